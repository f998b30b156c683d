"""The estimator's state: a fold of the cell's ledger, as far as estimates need it."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.cluster.nouns import JobSpec
from penstock.estimator.core.history import UNKNOWN, History, Run, bounded, key_of
from penstock.events import doors, facts
from penstock.events.base import wire_type
from penstock.ledger.record import GENESIS, RawRecord, read_valid

MAX_EARLY = 10_000  # estimates that the ledger holds before their job, as the placer keeps them
MAX_FORGOTTEN = (
    1_000_000  # ids of those that it had to let go; about 100 MB, and a placer that is as far behind
)


@dataclass(slots=True)
class LiveJob:
    """A job that the ledger says was submitted and has not ended."""

    key: bytes
    spec: JobSpec | None
    """None once it is estimated."""
    event_id: str
    """Of its submission."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Worker task of the latest attempt → GPUs given; a new placement replaces it and the exits."""
    exits: list[Run] = field(default_factory=list)


class Ledger:
    """Folds records in the order of their partition. `fold` is the only writer."""

    def __init__(self, jobs_topic: str, jobs_partition: int) -> None:
        self.history = History()
        self.live: dict[str, LiveJob] = {}
        self.jobs_offset = 0
        """Offset after the last record of the jobs partition that the placer answered."""
        self.void = 0
        """Records that broke the chain and were skipped (LAW 3)."""
        self._head = GENESIS
        self._jobs = (jobs_topic, jobs_partition)
        self._early: OrderedDict[str, None] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._again: list[str] = []
        self._job_of_task: dict[str, str] = {}

    @property
    def seq(self) -> int:
        """Of the last valid record."""
        return self._head.seq

    def fold(self, value: bytes) -> None:
        """One record of the ledger's partition."""
        found = read_valid(self._head, value)
        if found is None:
            self.void += 1
            return
        self._head, record = found
        cause = record.cause
        if cause.topic is not None and (cause.topic, cause.partition) == self._jobs:
            self.jobs_offset = max(self.jobs_offset, cause.offset + 1)
        for fact in record.facts:
            handler = _HANDLERS.get(fact.type)
            if handler is not None:
                handler(self, record, fact.event())

    def unestimated(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """(job id, job, spec) of jobs without an estimate in the ledger, oldest first."""
        return [(job_id, job, job.spec) for job_id, job in self.live.items() if job.spec is not None]

    def forgotten(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """As `unestimated`, of those jobs whose estimate came so early that the placer had to forget it; once each."""
        again, self._again = self._again, []
        found = [(job_id, self.live[job_id]) for job_id in again if job_id in self.live]
        return [(job_id, job, job.spec) for job_id, job in found if job.spec is not None]

    def _submitted(self, record: RawRecord, fact: doors.JobSubmitted) -> None:
        estimated = fact.job_id in self._early
        self._early.pop(fact.job_id, None)
        spec = None if estimated else fact.spec
        if self._forgotten.pop(fact.job_id, "") is None:
            self._again.append(fact.job_id)
        self.live[fact.job_id] = LiveJob(key_of(fact.spec), spec, record.cause.event_id or fact.job_id)

    def _estimated(self, record: RawRecord, fact: doors.JobEstimated) -> None:
        job = self.live.get(fact.job_id)
        if job is not None:
            job.spec = None
            return
        self._early[fact.job_id] = None
        if len(self._early) > MAX_EARLY:
            self._forgotten[self._early.popitem(last=False)[0]] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)

    def _placed(self, record: RawRecord, fact: facts.PlacementDecided) -> None:
        job = self.live.get(fact.job_id)
        if job is None:
            return
        self._forget_attempt(job)
        job.gpus = {place.task_id: len(place.gpus) for place in fact.tasks if place.role == "worker"}
        for task_id in job.gpus:
            self._job_of_task[task_id] = fact.job_id

    def _exited(self, record: RawRecord, fact: doors.TaskExited) -> None:
        job = self.live.get(self._job_of_task.get(fact.task_id, ""))
        if job is None or fact.cause != "exited" or fact.exit_code != 0:
            return
        used, run_ms = fact.usage, fact.exited_ms - fact.started_ms
        cpu_ms = bounded(used.cpu_ms)
        job.exits.append(
            Run(
                ended_ms=record.now_ms,
                seq=record.seq,
                run_ms=run_ms if run_ms >= 0 else UNKNOWN,
                gpus=job.gpus[fact.task_id],
                busy_cores=cpu_ms / run_ms if run_ms > 0 else UNKNOWN,
                host_memory_mib=bounded(used.host_memory_mib),
                gpu_memory_mib=bounded(used.gpu_memory_mib),
                gpu_utilisation_percent=bounded(used.gpu_utilisation_percent),
            )
        )

    def _ended(self, record: RawRecord, fact: facts.JobEnded) -> None:
        job = self.live.pop(fact.job_id, None)
        if job is None:
            return
        if fact.outcome == "succeeded" and job.exits:
            self.history.add(job.key, whole_job(job.exits))
        self._forget_attempt(job)

    def _forget_attempt(self, job: LiveJob) -> None:
        for task_id in job.gpus:
            self._job_of_task.pop(task_id, None)
        job.gpus = {}
        job.exits = []


def whole_job(exits: list[Run]) -> Run:
    """One run from its workers' exits (at least one): the largest of each field, the mean of utilisation."""
    columns = [[value for value in column if value == value] for column in zip(*exits, strict=True)]
    largest = Run(*(max(column) if column else UNKNOWN for column in columns))
    utilisation = columns[Run._fields.index("gpu_utilisation_percent")]
    if not utilisation:
        return largest
    return largest._replace(gpu_utilisation_percent=sum(utilisation) / len(utilisation))


_HANDLERS: Mapping[str, Callable[[Ledger, RawRecord, Any], None]] = MappingProxyType(
    {
        wire_type(doors.JobSubmitted): Ledger._submitted,
        wire_type(doors.JobEstimated): Ledger._estimated,
        wire_type(facts.PlacementDecided): Ledger._placed,
        wire_type(doors.TaskExited): Ledger._exited,
        wire_type(facts.JobEnded): Ledger._ended,
    }
)
