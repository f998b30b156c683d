"""Remaining time (ETA) of a job: the estimator's latest answer, counted down by the ledger's clock.

It counts down while the job runs and is constant while it does not. When an attempt ends early, the time
since its start is added again, or since its checkpoint if it saves: the next attempt repeats this work.
"""

from msgspec.structs import replace

from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.nouns.types import Value


class Remaining(Value, frozen=True, kw_only=True):
    """`EtaEstimated` as of a ledger time; its fields are described there."""

    attempt: int
    at_ms: int
    """Ledger time from which it counts down, while the job runs."""
    left_ms: Bounds
    level: float
    done: int
    steps: Bounds
    step_ms: Bounds
    source: str
    model_version: str | None = None
    first_of_kind: bool = False

    def passed_ms(self, running_ms: int | None, now_ms: int) -> int:
        """The part of it that has elapsed at `now_ms`, ≥ 0. `running_ms`: since when all tasks run; None:
        they do not."""
        if running_ms is None:
            return 0
        return max(0, now_ms - (self.at_ms if self.at_ms > running_ms else running_ms))


def remaining_of(fact: EtaEstimated, now_ms: int) -> Remaining:
    """The remaining time as of the record at `now_ms`:
    a start time in the ledger's future is set to `now_ms`."""
    return Remaining(
        attempt=fact.attempt,
        at_ms=min(fact.at_ms, now_ms),
        left_ms=fact.left_ms,
        level=fact.level,
        done=fact.done,
        steps=fact.steps,
        step_ms=fact.step_ms,
        source=fact.source,
        model_version=fact.model_version,
        first_of_kind=fact.first_of_kind,
    )


def begun_again(remaining: Remaining, running_ms: int | None, saved_ms: int | None, now_ms: int) -> Remaining:
    """Remaining time of the next attempt when the current one ends at `now_ms`: work since its checkpoint is
    lost.

    `running_ms`: since when it ran; `saved_ms`: when it saved last. Without a checkpoint all work of the
    attempt is lost.
    """
    done_ms = 0
    if running_ms is not None:
        done_ms = max(remaining.at_ms, running_ms) - max(running_ms, saved_ms or 0)
    return replace(remaining, at_ms=now_ms, left_ms=_later(remaining.left_ms, done_ms))


def begun_at_0(remaining: Remaining, kept_ms: int) -> Remaining:
    """Remaining time of an attempt that does not find the checkpoint, and repeats its `kept_ms` of work."""
    return replace(remaining, left_ms=_later(remaining.left_ms, kept_ms))


def _later(left: Bounds, by_ms: int) -> Bounds:
    return Bounds(
        middle=max(0.0, left.middle + by_ms),
        low=max(0.0, left.low + by_ms),
        high=max(0.0, left.high + by_ms),
    )
