"""Progress reports of simulated training scripts: iterations done and the mean time of a step, as
`penstock.sdk.progress` reports them.

Ideal: the SDK's own rule, a report whenever the iterations since the first have grown by a tenth. Departure:
whenever the time since the start has doubled, so that a job costs some ten records and not a hundred; and
only jobs whose trace counts iterations report any.
"""

import heapq
from itertools import count
from typing import NamedTuple

from penstock.model.inputs.external_events import StepsMeasured
from penstock.simulator.traces.jobs import TraceJob

FIRST_S = 30.0
"""Time from the start to the first report."""


class Reporting(NamedTuple):
    """One attempt's reports so far."""

    token: int
    began_s: float
    at_s: float = 0.0
    done: int = 0
    """Iterations at the latest report, which was at `at_s`; 0: there was none."""


class StepReports:
    """Schedules and makes the reports of running jobs. The caller supplies their progress."""

    def __init__(self) -> None:
        self._attempts: dict[str, Reporting] = {}
        self._due: list[tuple[float, int, str, int]] = []
        self._order = count()

    def started(self, job: TraceJob, token: int, now_s: float) -> None:
        """All of the job's tasks run."""
        if job.iterations:
            self._attempts[job.job_id] = Reporting(token, now_s)
            self._at(now_s + FIRST_S, job.job_id, token)

    def next_s(self) -> float | None:
        """The next moment at which a job may report."""
        while self._due:
            at_s, _, job_id, token = self._due[0]
            known = self._attempts.get(job_id)
            if known is not None and known.token == token:
                return at_s
            heapq.heappop(self._due)
        return None

    def due(self, now_s: float) -> tuple[str, int] | None:
        """A job that may report now, and the token of its attempt, which may be over."""
        at_s = self.next_s()
        if at_s is None or at_s > now_s:
            return None
        _, _, job_id, token = heapq.heappop(self._due)
        self._at(now_s + max(FIRST_S, now_s - self._attempts[job_id].began_s), job_id, token)
        return job_id, token

    def over(self, job_id: str) -> None:
        """The job's attempt no longer runs."""
        self._attempts.pop(job_id, None)

    def report(
        self, job: TraceJob, share: float, node_id: str, task_id: str, now_s: float
    ) -> StepsMeasured | None:
        """A report after `share` of the job's work, 0 – 1.
        None: no iteration was completed since the latest report."""
        known = self._attempts.get(job.job_id)
        if known is None or not job.iterations:
            return None
        done = min(job.iterations, int(share * job.iterations))
        steps = done - known.done if known.done else 0
        if done <= known.done:
            return None
        self._attempts[job.job_id] = known._replace(at_s=now_s, done=done)
        return StepsMeasured(
            node_id=node_id,
            task_id=task_id,
            token=known.token,
            at_ms=int(now_s * 1_000),
            done=done,
            total=job.iterations,
            steps=steps,
            step_ms=1_000 * (now_s - known.at_s) / steps if steps else 0.0,
        )

    def _at(self, at_s: float, job_id: str, token: int) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), job_id, token))
