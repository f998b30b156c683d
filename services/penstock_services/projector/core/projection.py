"""Pure projection of the ledger to read models: records in, rows out.

Ideal: a row is a function of the state after a record. Departure: rows are built once per batch, for the
entities that the batch changed; since a row only depends on the state, the tables at a given position are the
same for any division of the ledger into batches, and so a rebuild can be compared with them row by row.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.views import (
    Ending,
    Row,
    TaskOf,
    gpu_owners,
    gpu_row,
    job_changes,
    job_row,
    node_row,
    task_of,
    task_row,
)
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import CoresDecided
from penstock.model.decisions.decisions import is_decision
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event

REJECTED = "penstock.input.rejected"
DEAD_LETTERED = "penstock.input.dead_lettered"
AMENDED = "penstock.record.amended"

JOB_CHANGES = tuple(job_changes(JobState("any", JobSpec(command=("true",)), 0, 0), 0))
"""Columns of `penstock.ledger.views.job_changes`."""


class Explained(msgspec.Struct):
    job_id: str


_explanations = msgspec.json.Decoder(list[msgspec.Raw]).decode
_explained = msgspec.json.Decoder(Explained).decode


class Batch(dict[str, list[Row]]):
    """Rows per table; those of jobs, tasks, nodes and gpus replace older ones, the others are new.

    `job_changes`: the columns `JOB_CHANGES` of jobs whose other columns stay as they are.
    """


class Projection:
    """A fold that records which entities it changed. `replica`: its present state."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._owners = gpu_owners(replica.state.jobs)
        self._listed = set(replica.state.nodes)
        """Nodes that have a row."""
        self._reset()

    def _reset(self) -> None:
        self._jobs: dict[str, tuple[JobState, int, Ending | None]] = {}
        self._described: set[str] = set()  # jobs that were submitted or estimated
        self._tasks: dict[str, tuple[TaskOf, Any]] = {}
        self._nodes: dict[str, int] = {}
        self._gpus: dict[tuple[str, int], None] = {}
        self._shrunk: dict[str, int] = {}
        self._forgotten: dict[str, None] = {}
        self._decisions: list[Row] = []
        self._events: list[Row] = []

    def take(self, value: bytes, offset: int) -> RawRecord | None:
        """Folds one record of the ledger's partition and returns it; None for a void one, which only moves
        the offset."""
        before = len(self._events)
        record = self.replica.take(value, offset, self._fold)
        self._drop_forgotten()
        if record is not None and record.amended:
            self._amended(record, offset, self._events[before:])
        if record is not None and record.outcome != "committed":
            self._refused(record)
        return record

    def _fold(self, record: RawRecord, n: int, event: Event) -> None:
        """Folds one fact, logs it, and records the entities that it changes."""
        state = self.replica.state
        job_id, node_id, task_id = self._subjects(event)
        self._log(record, n, event, job_id, node_id, task_id)
        job = state.jobs.get(job_id) if job_id is not None else None
        evolve(state, event)
        touch = TOUCHES.get(type(event))
        if touch is not None:
            touch(self, event, job if job is not None or job_id is None else state.jobs.get(job_id))

    def drain(self) -> Batch:
        """The rows for all records taken since the last call."""
        state = self.replica.state
        jobs, changes = [], []
        for job_id, found in self._jobs.items():
            if job_id in self._described:
                jobs.append(job_row(*found))
            else:
                changes.append(job_changes(*found))
        batch = Batch(
            jobs=jobs,
            job_changes=changes,
            tasks=[task_row(*found) for found in self._tasks.values()],
            nodes=[
                node_row(state.nodes[node_id], seq)
                for node_id, seq in self._nodes.items()
                if node_id in state.nodes
            ],
            gpus=[
                gpu_row(state.nodes[node_id], gpu, self._owners)
                for node_id, gpu in self._gpus
                if node_id in state.nodes and gpu < len(state.nodes[node_id].gpu_uuids)
            ],
            shrunk=[{"node_id": node_id, "gpu": count} for node_id, count in self._shrunk.items()],
            forgotten=[{"node_id": node_id} for node_id in self._forgotten],
            decisions=self._decisions,
            events=self._events,
        )
        self._reset()
        return batch

    # ------------------------------------------------------------------------------ effects of a record

    def _subjects(self, event: Event) -> tuple[str | None, str | None, str | None]:
        """(job, node, task) of a fact; tasks are looked up before the fold removes them."""
        found: dict[str, Any] = {name: getattr(event, name) for name in _naming(type(event))}
        job_id: str | None = found.get("job_id")
        node_id: str | None = found.get("node_id")
        task_id: str | None = found.get("task_id")
        if job_id is None and task_id is not None and node_id is not None:
            job = job_of_task(self.replica.state, node_id, task_id)
            job_id = None if job is None else job.job_id
        spec = found.get("node")
        if node_id is None and spec is not None:
            node_id = spec.node_id
        about = found.get("about")
        if about is not None and about.kind != "place_more" and about.id in self.replica.state.jobs:
            job_id = about.id
        return job_id, node_id, task_id

    def _log(
        self,
        record: RawRecord,
        n: int,
        event: Event,
        job_id: str | None,
        node_id: str | None,
        task_id: str | None,
    ) -> None:
        row: Row = {
            "seq": record.seq,
            "n": n,
            "at_ms": record.now_ms,
            "type": record.facts[n].type.rpartition(".v")[0],
            "job_id": job_id,
            "node_id": node_id,
            "task_id": task_id,
            "data": orjson.Fragment(bytes(record.facts[n].data)),
        }
        self._events.append(row)
        if is_decision(event):
            self._decisions.append(
                {
                    "seq": record.seq,
                    "n": n,
                    "at_ms": record.now_ms,
                    "term": record.term,
                    "kind": row["type"],
                    "job_id": job_id,
                    "node_id": node_id,
                    "cause": _cause(record),
                    "data": row["data"],
                    "explanation": _explanation(record, job_id)
                    if isinstance(event, ledger_events.PlacementDecided | MoveDecided)
                    else None,
                }
            )

    def _amended(self, record: RawRecord, offset: int, facts: list[Row]) -> None:
        """That an operator amended the record is an event of the stream too,
        of the first job that it is about."""
        self._events.append(
            {
                "seq": record.seq,
                "n": len(record.facts) + 1,
                "at_ms": record.now_ms,
                "type": AMENDED,
                "job_id": next((row["job_id"] for row in facts if row["job_id"] is not None), None),
                "node_id": None,
                "task_id": None,
                "data": {"offset": offset, **orjson.loads(bytes(record.amended))},
            }
        )

    def _refused(self, record: RawRecord) -> None:
        """A rejected or dead-lettered input is an event of the stream too."""
        self._events.append(
            {
                "seq": record.seq,
                "n": len(record.facts),
                "at_ms": record.now_ms,
                "type": REJECTED if record.outcome == "rejected" else DEAD_LETTERED,
                "job_id": None,
                "node_id": None,
                "task_id": None,
                "data": {"reason": record.reason, "cause": _cause(record)},
            }
        )

    # ------------------------------------------------------------------------------- changed entities

    def touch_job(self, job: JobState | None, ending: Ending | None = None) -> None:
        if job is not None:
            self._jobs[job.job_id] = (job, self.replica.state.seq, ending)

    def touch_task(self, job: JobState, task_id: str, exited: Any = None) -> None:
        self._tasks[task_id] = (task_of(self.replica.state.nodes, job, job.tasks[task_id]), exited)

    def touch_node(self, node_id: str) -> None:
        self._nodes[node_id] = self.replica.state.seq

    def touch_target(self, job: JobState) -> None:
        """Nodes on which resources are, or were, reserved for its latest move."""
        for node_id in () if job.moves.latest is None else job.moves.latest.nodes:
            self.touch_node(node_id)

    def own(self, job: JobState, task_id: str) -> None:
        """The task holds its GPUs from now on."""
        place = job.tasks[task_id].place
        for gpu in place.gpus:
            self._owners.setdefault((place.node_id, gpu), {})[task_id] = job.job_id
            self._gpus[place.node_id, gpu] = None
        self.touch_node(place.node_id)

    def disown(self, job: JobState, task_id: str) -> None:
        """The task is proven to have ended."""
        place = job.tasks[task_id].place
        for gpu in place.gpus:
            self._owners.get((place.node_id, gpu), {}).pop(task_id, None)
            self._gpus[place.node_id, gpu] = None
        self.touch_node(place.node_id)

    def _drop_forgotten(self) -> None:
        """Removes rows of nodes that the state has dropped; the latest are last."""
        for node_id in reversed(self.replica.state.forgotten_nodes):
            if node_id not in self._listed:
                return
            self._listed.discard(node_id)
            self._forgotten[node_id] = None
            self._shrunk[node_id] = 0

    def touch_joined(self, node: NodeState) -> None:
        """A node joined."""
        self._listed.add(node.spec.node_id)
        self._forgotten.pop(node.spec.node_id, None)
        self.touch_inventory(node)

    def touch_inventory(self, node: NodeState) -> None:
        """A node joined or changed: all its GPUs, and those that it no longer has."""
        node_id, count = node.spec.node_id, len(node.gpu_uuids)
        self.touch_node(node_id)
        self._shrunk[node_id] = count
        for gpu in range(count):
            self._gpus[node_id, gpu] = None


@cache
def _naming(kind: type[Event]) -> tuple[str, ...]:
    """The fields that name what a fact is about."""
    return tuple(
        name for name in ("job_id", "node_id", "task_id", "node", "about") if name in kind.__struct_fields__
    )


def _cause(record: RawRecord) -> Row:
    """Without the fields of the other kinds of causes."""
    cause = record.cause
    if cause.topic is not None:
        return {
            "topic": cause.topic,
            "partition": cause.partition,
            "offset": cause.offset,
            "event_id": cause.event_id,
        }
    if cause.timer_id is not None:
        return {"timer_id": cause.timer_id}
    return {"placer_id": cause.placer_id}


def _explanation(record: RawRecord, job_id: str | None) -> orjson.Fragment | None:
    """The part of the record's explanation for this job."""
    for raw in _explanations(record.explanation):
        if _explained(raw).job_id == job_id:
            return orjson.Fragment(bytes(raw))
    return None


Touch = Callable[[Projection, Any, JobState | None], None]


def _job(to: Projection, event: Any, job: JobState | None) -> None:
    to.touch_job(job)


def _moved(to: Projection, event: Any, job: JobState | None) -> None:
    assert job is not None
    to.touch_job(job)
    to.touch_target(job)


def _described(to: Projection, event: Any, job: JobState | None) -> None:
    to.touch_job(job)
    to._described.add(event.job_id)


def _placed(to: Projection, event: Any, job: JobState | None) -> None:
    assert job is not None
    to.touch_job(job)
    for task_id in job.tasks:
        to.touch_task(job, task_id)
        to.own(job, task_id)


def _stopped(to: Projection, event: Any, job: JobState | None) -> None:
    assert job is not None
    to.touch_job(job)
    to.touch_target(job)
    for task_id, task in job.tasks.items():
        if task.exit.at_ms is None:
            to.touch_task(job, task_id)


def _ended(to: Projection, event: ledger_events.JobEnded, job: JobState | None) -> None:
    if job is not None:
        to.touch_target(job)
    to.touch_job(job, Ending(event.outcome, event.exit_code, event.reason, to.replica.state.now_ms))


def _started(to: Projection, event: external_events.TaskStarted, job: JobState | None) -> None:
    assert job is not None
    to.touch_job(job)
    to.touch_task(job, event.task_id)


def _exited(to: Projection, event: Any, job: JobState | None) -> None:
    if job is None:
        return  # a task that the cell had dropped
    to.touch_job(job)
    to.touch_task(job, event.task_id, event if isinstance(event, external_events.TaskExited) else None)
    to.disown(job, event.task_id)


def _cores(to: Projection, event: CoresDecided, job: JobState | None) -> None:
    assert job is not None
    to.touch_job(job)
    to.touch_task(job, event.task_id)
    to.touch_node(event.node_id)


def _joined(to: Projection, event: external_events.NodeJoined, job: JobState | None) -> None:
    to.touch_joined(to.replica.state.nodes[event.node.node_id])


def _inventory(to: Projection, event: Any, job: JobState | None) -> None:
    to.touch_inventory(to.replica.state.nodes[event.node.node_id])


def _node(to: Projection, event: Any, job: JobState | None) -> None:
    to.touch_node(event.node_id)


def _gpu(to: Projection, event: external_events.GpuFaulted, job: JobState | None) -> None:
    to.touch_node(event.node_id)
    node = to.replica.state.nodes[event.node_id]
    slot = event.gpu if event.uuid is None else node.slot_of(event.uuid)
    if slot is not None:
        to._gpus[event.node_id, slot] = None


TOUCHES: Mapping[type[Event], Touch] = MappingProxyType(
    {
        external_events.JobSubmitted: _described,
        JobEstimated: _described,
        ledger_events.PlacementDecided: _placed,
        ledger_events.StopDecided: _stopped,
        MoveDecided: _moved,
        MoveGivenUp: _moved,
        JobConverged: _job,
        ledger_events.JobRequeued: _moved,
        ledger_events.JobQueued: _job,
        ledger_events.JobFoundUnschedulable: _job,
        ledger_events.JobFoundSchedulable: _job,
        ledger_events.JobEnded: _ended,
        external_events.JobHoldRequested: _job,
        external_events.JobReleaseRequested: _job,
        external_events.JobCheckpointRequested: _job,
        external_events.TaskStarted: _started,
        external_events.TaskExited: _exited,
        ledger_events.TaskLost: _exited,
        CoresDecided: _cores,
        external_events.OrderRefused: _exited,
        external_events.NodeJoined: _joined,
        external_events.NodeChanged: _inventory,
        external_events.NodeSuspected: _node,
        external_events.NodeCordoned: _node,
        external_events.NodeUncordoned: _node,
        external_events.NodeLeft: _node,
        ledger_events.NodeLost: _node,
        ledger_events.NodeRestored: _node,
        NodeDistrusted: _node,
        NodePutOnProbation: _node,
        NodeTrusted: _node,
        external_events.GpuFaulted: _gpu,
    }
)
