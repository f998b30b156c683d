"""What the estimator adds to the cell's state of a live job: its latest attempt's allocation, progress and
exits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock_services.estimator.core.fold.earlier import Earlier
from penstock_services.estimator.core.fold.progress import Progress, TaskPhases
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import (
    Allocation,
    EstimateSummary,
    JobInfo,
    estimate_summary,
    job_info,
)

NO_WORKERS: Mapping[str, TaskPhases] = MappingProxyType({})


class At(NamedTuple):
    """Where in the ledger a fact stands."""

    seq: int
    now_ms: int
    event_id: str | None = None
    """Id of the input that the record answers."""


@dataclass(slots=True)
class LiveJob:
    """A submitted job that has not ended. `job`: what every reader folds."""

    job: JobState
    info: JobInfo
    """Of its latest attempt, as far as the job is moldable."""
    event_id: str
    """Id of its submission."""
    allocation: Allocation | None = None
    """Of each worker of the latest attempt; a new placement replaces it, and the exits. None: it was never
    placed."""
    exits: list[Run] = field(default_factory=list)
    partly: bool = False
    """Some of its workers had exited before this fold began: it teaches nothing."""
    progress: Progress | None = None
    """Of the latest attempt; None: it was never placed."""
    earlier: Earlier = field(default_factory=Earlier)

    @property
    def workers(self) -> Mapping[str, TaskPhases]:
        """Worker tasks of the latest attempt, also once that is over."""
        return NO_WORKERS if self.progress is None else self.progress.tasks

    def info_of_attempt(self, workers: int) -> JobInfo:
        """Runs of a moldable job in one shape teach about that shape."""
        spec = self.job.spec
        return self.info if spec.min_workers is None else job_info(spec.shaped(workers))

    def disturbed_since(self, ms: int) -> bool:
        """Whether there was a neighbour, a cap, or another number of cores than the settled one since then,
        in ledger time."""
        found = self.progress
        if found is None or not found.disturbed:
            return False
        return found.conditions != found.usual or found.since_ms > ms


def summary_of(job: JobState) -> EstimateSummary | None:
    """Of the estimate with which the job runs."""
    return None if job.estimate is None else estimate_summary(job.estimate)
