"""State of a live job in the estimator: the spec to estimate, and its latest attempt's allocation, progress
and exits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.fold.earlier import Earlier
from penstock_services.estimator.core.fold.progress import Progress
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import Allocation, EstimateSummary, JobInfo, job_info


class At(NamedTuple):
    """Where in the ledger a fact stands."""

    seq: int
    now_ms: int
    event_id: str | None = None
    """Id of the input that the record answers."""


@dataclass(slots=True)
class LiveJob:
    """A submitted job that has not ended."""

    info: JobInfo
    spec: JobSpec | None
    """The spec to estimate; None once it is estimated, or once it is too late for a retry."""
    event_id: str
    """Id of its submission."""
    estimate: EstimateSummary | None = None
    asked: JobSpec | None = None
    """The spec for an attempt that is estimated anew; without command, environment and labels."""
    attempt: int = 0
    """The attempt to estimate; 0: its first."""
    servers: tuple[str, ...] = ()
    """Parameter servers of the latest attempt, as `workers`."""
    limits_mib: Mapping[str, int] = field(default_factory=dict)
    """Role → the smallest cap on host memory in the latest attempt."""
    workers: dict[str, None] = field(default_factory=dict)
    """Worker tasks of the latest attempt; a new placement replaces them, their allocations, and the exits."""
    allocation: Allocation | None = None
    exits: list[Run] = field(default_factory=list)
    partly: bool = False
    """Some of its workers had exited before this fold began: it teaches nothing."""
    progress: Progress | None = None
    """Of the latest attempt; None: it was never placed."""
    earlier: Earlier = field(default_factory=Earlier)

    @property
    def contract(self) -> str:
        """How it saves (`JobSpec.checkpoint`)."""
        return "none" if self.asked is None else self.asked.checkpoint

    def disturbed_since(self, ms: int) -> bool:
        """Whether there was a neighbour, a cap, or another number of cores than the settled one since then,
        in ledger time."""
        found = self.progress
        if found is None or not found.disturbed:
            return False
        return found.conditions != found.usual or found.since_ms > ms


def without_texts(spec: JobSpec) -> JobSpec:
    """The retained part of each live job's spec: the key of its command is in `JobInfo`. A moldable one has a
    key for each shape."""
    return replace(
        spec,
        command=("-",) if spec.min_workers is None else spec.command,
        env={},
        secrets={},
        labels={},
        workdir=None,
        environment=None,
        code=None,
    )


def info_of_attempt(job: LiveJob, workers: int) -> JobInfo:
    """Runs of a moldable job in one shape teach about that shape."""
    asked = job.asked
    return job.info if asked is None or asked.min_workers is None else job_info(asked.shaped(workers))
