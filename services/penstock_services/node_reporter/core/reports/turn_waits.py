"""Filter of a group member's waits for turns: reports are published where the part of its time without waits
has changed by `SPEED_STEP` since the last published one, at a rate sustainable for months.

A report that is left out is soon replaced: the SDK repeats it (`penstock.sdk.progress`) while the job waits.
"""

from penstock.model.decisions.groups import SPEED_STEP
from penstock.model.inputs.external_events import StepsMeasured
from penstock_services.node_reporter.core.reports.rates import TokenBucket

BURST = 10  # at once: joining a group, its first turns and a slow member are a handful of changes
PER_S = 1 / 30  # sustained: twice in the minute after which a group is judged (`dissolution.PATIENCE_MS`)
LEAST = 0.001  # of its time; less is no slower
MS_PER_S = 1_000


class WaitFilter:
    """Of one task."""

    __slots__ = ("_bucket", "_last")

    def __init__(self) -> None:
        self._bucket = TokenBucket(PER_S, BURST)
        self._last = 1.0

    def passes(self, steps: StepsMeasured) -> bool:
        """Whether it is published for its waits; `published` follows."""
        speed = _speed(steps)
        if speed is None or 1 / SPEED_STEP < speed / self._last < SPEED_STEP:
            return False
        return self._bucket.take(steps.at_ms / MS_PER_S)

    def published(self, steps: StepsMeasured) -> None:
        """It is published, for whatever reason."""
        self._last = _speed(steps) or self._last


def _speed(steps: StepsMeasured) -> float | None:
    """The part of a step without waits; None: the report has no window."""
    if not steps.steps or not steps.step_ms:
        return None
    return max(LEAST, 1.0 - steps.waited_ms / steps.step_ms)
