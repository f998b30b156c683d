"""Fold of the ledger into time series and Gantt bars: GPU occupancy, queue length, free capacity.

Its only input are the bytes of records, from a running simulation or an exported ledger: the same ledger gives the
same charts. Times are the ledger's, in ms since its first record.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.ledger.record import read
from penstock.model import external_events
from penstock.model import ledger_events as ledger
from penstock.model.codec import decode_fact
from penstock.model.event import wire_type
from penstock.model.types import WHOLE_GPU, ResourceVector
from penstock.simulator.report.occupancy import SIZES, Block, Node, Occupancy

EXITED, STOPPED, STILL = 0, 1, 2
"""How a bar ends: its task exited by itself; its job was ordered to stop; it has not ended yet."""
NEVER = -1

OfTask: TypeAlias = external_events.TaskExited | external_events.OrderRefused | ledger.TaskLost


def integers() -> "array[int]":
    return array("q")


def reals() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Job:
    """One job's times, ms; `NEVER` where it has not come to that."""

    job_id: str
    name: str
    model: str
    owner: str
    submitted_ms: int
    workers: int
    gpus: float = 0.0
    """Of the whole gang; a share of a GPU counts as such."""
    placed_ms: int = NEVER
    """First placement."""
    ended_ms: int = NEVER
    outcome: str = ""
    ran_ms: int = 0
    """With all its tasks started, all attempts together."""
    running_since_ms: int = NEVER
    attempts: int = 0
    stopping: bool = False
    waiting: bool = True
    """In the queue."""
    starting: set[str] = field(default_factory=set)
    """Tasks of the current attempt that have not started."""

    @property
    def jct_ms(self) -> int:
        return self.ended_ms - self.submitted_ms


class Holding(NamedTuple):
    """A task that holds GPUs; `attempt` of its job."""

    job: int
    attempt: int
    node: Node
    gpus: tuple[int, ...]
    share: int
    since_ms: int
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class Bars:
    """Rectangles of the Gantt chart, one column per field; `y` and `height` as in `Block`."""

    job: "array[int]" = field(default_factory=integers)
    node: "array[int]" = field(default_factory=integers)
    y: "array[int]" = field(default_factory=integers)
    height: "array[int]" = field(default_factory=integers)
    start_ms: "array[int]" = field(default_factory=integers)
    end_ms: "array[int]" = field(default_factory=integers)
    attempt: "array[int]" = field(default_factory=integers)
    how: "array[int]" = field(default_factory=integers)

    def add(self, held: Holding, end_ms: int, how: int) -> None:
        for block in held.blocks:
            self.job.append(held.job)
            self.node.append(held.node.ordinal)
            self.y.append(block.y)
            self.height.append(block.height)
            self.start_ms.append(held.since_ms)
            self.end_ms.append(end_ms)
            self.attempt.append(held.attempt)
            self.how.append(how)


@dataclass(slots=True)
class Steps:
    """What changed when: from `at_ms[i]` on until the next row, the values of row i hold."""

    at_ms: "array[int]" = field(default_factory=integers)
    held: "array[float]" = field(default_factory=reals)
    """GPUs given to jobs; shares count as such."""
    working: "array[float]" = field(default_factory=reals)
    """GPUs of jobs all of whose tasks have started and none has been stopped or ended."""
    waiting: "array[int]" = field(default_factory=integers)
    """Jobs in the queue."""
    gpus: "array[int]" = field(default_factory=integers)
    """Of the nodes that are there."""
    startable: "tuple[array[int], ...]" = field(default_factory=lambda: tuple(integers() for _ in SIZES))
    """Per size of `SIZES`: how many more jobs of that size could start."""


class Timeline:
    """`take` each record's bytes in order; then read the fields."""

    def __init__(self) -> None:
        self.records = 0
        self.profile = ""
        self.seed = 0
        self.now_ms = 0
        self.preemptions = 0
        self.jobs: list[Job] = []
        self.bars = Bars()
        self.steps = Steps()
        self.occupancy = Occupancy()
        self._zero_ms: int | None = None
        self._job_at: dict[str, int] = {}
        self._holding: dict[str, Holding] = {}
        self._early: dict[str, ResourceVector] = {}
        self._working = 0.0
        self._waiting = 0
        self._dirty = False

    def take(self, value: bytes) -> None:
        """One record. Raises `penstock.ledger.record.Unreadable`."""
        record = read(value)
        self.records += 1
        self.fold(record.now_ms, [(fact.type, fact.data) for fact in record.facts])

    def fold(self, now_ms: int, found: Iterable[tuple[str, msgspec.Raw]]) -> None:
        """(wire type, data) of facts of one moment.

        Raises `KeyError` with a job or node that no earlier fact introduced, `EventError` for a fact that cannot be read.
        """
        if self._zero_ms is None:
            self._zero_ms = now_ms
        self.now_ms = now_ms - self._zero_ms
        for kind, data in found:
            handler = HANDLERS.get(kind)
            if handler is not None:
                handler(self, decode_fact(kind, data))
        if self._dirty:
            self._note()

    def close(self) -> None:
        """The ledger ends here: what is still held gets a bar up to now."""
        for held in self._holding.values():
            self.bars.add(held, self.now_ms, STILL)
        self._holding.clear()

    def _note(self) -> None:
        """A row of `steps`; a later one of the same moment takes its place."""
        self._dirty = False
        steps = self.steps
        row = len(steps.at_ms) - 1
        if row < 0 or steps.at_ms[row] != self.now_ms:
            for column in (steps.at_ms, steps.waiting, steps.gpus, *steps.startable):
                column.append(self.now_ms)
            steps.held.append(0.0)
            steps.working.append(0.0)
            row += 1
        steps.held[row] = self.occupancy.held_milli / WHOLE_GPU
        steps.working[row] = self._working
        steps.waiting[row] = self._waiting
        steps.gpus[row] = self.occupancy.gpus
        for column, count in zip(steps.startable, self.occupancy.startable(), strict=True):
            column[row] = count

    # ------------------------------------------------------------------------------------------- jobs

    def _submitted(self, fact: external_events.JobSubmitted) -> None:
        spec, asked = fact.spec, fact.spec.resources
        job = Job(fact.job_id, spec.name, spec.model or "", spec.owner, self.now_ms, spec.workers)
        self._job_at[fact.job_id] = len(self.jobs)
        self.jobs.append(job)
        early = self._early.pop(fact.job_id, None)
        worker = early or ResourceVector(
            gpus=asked.gpus or 0, gpu_share_milli=asked.gpu_share_milli or WHOLE_GPU
        )
        self._size(job, worker)
        self._waiting += 1
        self._dirty = True

    def _estimated(self, fact: external_events.JobEstimated) -> None:
        at = self._job_at.get(fact.job_id)
        if at is None:
            self._early[fact.job_id] = fact.estimate.worker
        else:
            self._size(self.jobs[at], fact.estimate.worker)

    def _size(self, job: Job, worker: ResourceVector) -> None:
        job.gpus = job.workers * worker.gpus * worker.gpu_share_milli / WHOLE_GPU

    def _wait(self, job: Job, waits: bool) -> None:
        self._waiting += waits - job.waiting
        job.waiting = waits
        self._dirty = True

    def _preempted(self, fact: ledger.JobPreempted) -> None:
        self.preemptions += 1

    def _stop(self, fact: ledger.StopDecided) -> None:
        job = self._job(fact.job_id)
        job.stopping = True
        self._halt(job)

    def _requeued(self, fact: ledger.JobRequeued) -> None:
        job = self._job(fact.job_id)
        self._halt(job)
        self._wait(job, fact.not_before_ms is None)

    def _queued(self, fact: ledger.JobQueued) -> None:
        self._wait(self._job(fact.job_id), True)

    def _found(self, fact: ledger.JobFoundUnschedulable | ledger.JobFoundSchedulable) -> None:
        self._wait(self._job(fact.job_id), isinstance(fact, ledger.JobFoundSchedulable))

    def _ended(self, fact: ledger.JobEnded) -> None:
        job = self._job(fact.job_id)
        self._halt(job)
        self._wait(job, False)
        job.ended_ms = self.now_ms
        job.outcome = fact.outcome

    def _job(self, job_id: str) -> Job:
        return self.jobs[self._job_at[job_id]]

    def _halt(self, job: Job) -> None:
        """A gang makes no progress from the first stop or exit of a member on."""
        if job.running_since_ms != NEVER:
            job.ran_ms += self.now_ms - job.running_since_ms
            job.running_since_ms = NEVER
            self._working -= job.gpus
            self._dirty = True

    # ------------------------------------------------------------------------------------------ tasks

    def _placed(self, fact: ledger.PlacementDecided) -> None:
        at = self._job_at[fact.job_id]
        job = self.jobs[at]
        self._wait(job, False)
        job.stopping = False
        job.attempts = fact.attempt
        if job.placed_ms == NEVER:
            job.placed_ms = self.now_ms
        job.starting = {place.task_id for place in fact.tasks}
        held_milli = 0
        for place in fact.tasks:
            node, share = self.occupancy[place.node_id], place.gpu_share_milli
            blocks = self.occupancy.give(node, place.gpus, share)
            self._holding[place.task_id] = Holding(
                at, fact.attempt, node, place.gpus, share, self.now_ms, blocks
            )
            held_milli += len(place.gpus) * share
        job.gpus = held_milli / WHOLE_GPU

    def _started(self, fact: external_events.TaskStarted) -> None:
        held = self._holding.get(fact.task_id)
        if held is None:
            return
        job = self.jobs[held.job]
        if fact.task_id in job.starting:
            job.starting.remove(fact.task_id)
            if not job.starting and not job.stopping:
                job.running_since_ms = self.now_ms
                self._working += job.gpus
                self._dirty = True

    def _freed(self, fact: OfTask) -> None:
        held = self._holding.pop(fact.task_id, None)
        if held is None:
            return
        job = self.jobs[held.job]
        self._halt(job)
        self.bars.add(held, self.now_ms, STOPPED if job.stopping else EXITED)
        self.occupancy.take_back(held.node, held.gpus, held.share, held.blocks)
        self._dirty = True

    # ------------------------------------------------------------------------------------------ nodes

    def _joined(self, fact: external_events.NodeJoined | external_events.NodeChanged) -> None:
        self.occupancy.join(fact.node.node_id, len(fact.node.gpus))
        self._dirty = True

    def _suspected(self, fact: external_events.NodeSuspected | external_events.NodeLeft) -> None:
        self.occupancy.close(fact.node_id)
        self._dirty = True

    def _lost(self, fact: ledger.NodeLost) -> None:
        self.occupancy.close(fact.node_id, gone=True)
        self._dirty = True

    def _restored(self, fact: ledger.NodeRestored) -> None:
        self.occupancy.reopen(fact.node_id)
        self._dirty = True

    def _faulted(self, fact: external_events.GpuFaulted) -> None:
        self.occupancy.fault(fact.node_id, fact.gpu)
        self._dirty = True

    def _term(self, fact: ledger.TermStarted) -> None:
        self.profile, self.seed = fact.settings.profile, fact.settings.seed


HANDLERS: Mapping[str, Callable[[Timeline, Any], None]] = MappingProxyType(
    {
        wire_type(external_events.JobSubmitted): Timeline._submitted,
        wire_type(external_events.JobEstimated): Timeline._estimated,
        wire_type(external_events.NodeJoined): Timeline._joined,
        wire_type(external_events.NodeChanged): Timeline._joined,
        wire_type(external_events.NodeSuspected): Timeline._suspected,
        wire_type(external_events.NodeLeft): Timeline._suspected,
        wire_type(external_events.GpuFaulted): Timeline._faulted,
        wire_type(external_events.TaskStarted): Timeline._started,
        wire_type(external_events.TaskExited): Timeline._freed,
        wire_type(external_events.OrderRefused): Timeline._freed,
        wire_type(ledger.TaskLost): Timeline._freed,
        wire_type(ledger.NodeLost): Timeline._lost,
        wire_type(ledger.NodeRestored): Timeline._restored,
        wire_type(ledger.PlacementDecided): Timeline._placed,
        wire_type(ledger.StopDecided): Timeline._stop,
        wire_type(ledger.JobPreempted): Timeline._preempted,
        wire_type(ledger.JobQueued): Timeline._queued,
        wire_type(ledger.JobRequeued): Timeline._requeued,
        wire_type(ledger.JobFoundUnschedulable): Timeline._found,
        wire_type(ledger.JobFoundSchedulable): Timeline._found,
        wire_type(ledger.JobEnded): Timeline._ended,
        wire_type(ledger.TermStarted): Timeline._term,
    }
)

VERSIONED: Mapping[str, str] = MappingProxyType({kind.rpartition(".v")[0]: kind for kind in HANDLERS})
"""Type of a fact as the gateway streams it → as the ledger has it."""
