"""What a placer writes about inputs at the ends of their legal ranges, read by the core of every real
reader."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from infra.codegen.examples import EXAMPLES
from penstock.ledger.evolve import evolve
from penstock.ledger.job_state import JobState
from penstock.ledger.record import RawRecord
from penstock.ledger.replica import Replica
from penstock.ledger.snapshot import dump, load
from penstock.ledger.succession import awaited
from penstock.model.codec import decode, encode
from penstock.model.errors import EventError
from penstock.model.event import Event, wire_type
from penstock.model.external_events import (
    JobProgress,
    JobSubmitted,
    NodeChanged,
    NodeEvent,
    NodeJoined,
    TaskPhaseChanged,
    WorkProgressed,
)
from penstock.model.settings import PlacerSettings
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.model.transitions import JobStatus
from penstock.model.types import Milliseconds, Value
from penstock_services.batcher.core.batcher import Batcher
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.estimator.core.state import State
from penstock_services.gateway.shell.follower import Follower
from penstock_services.migrator.core.migrator import Migrator
from penstock_services.placer.core.recorder import Recorder
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import LARGEST, REPLACED, _json, _saturate
from tests.support.driver import CellDriver, estimate, eta, job_spec, node_spec

INPUTS = [event for event in EXAMPLES.values() if event.TOPIC in INPUT_TOPICS]
UNBOUNDED = (1 << 53, 1 << 63, 1 << 64, 1 << 70)
STEPS = 60


class Readers:
    """The fold of each service, on records as they are in the log."""

    def __init__(self) -> None:
        self.batcher, self.guard, self.migrator = Batcher(), ContentionGuard(), Migrator()
        self.cell, self.gateway = Replica(), Follower(Replica())
        self.projection, self.estimator = Projection(Replica()), State(Topic.JOBS, 0)

    def take(self, value: bytes, offset: int) -> None:
        """One record, by all of them, and the rows that it leads to."""
        assert self.cell.take(value, offset, self._see) is not None
        assert self.gateway.replica.take(value, offset, self.gateway._fold) is not None
        assert self.estimator.fold(value, offset)
        assert self.projection.take(value, offset)
        batch = self.projection.drain()
        for table in REPLACED:
            for row in batch[table]:
                numbers = {name: LARGEST["bigint"] for name, found in row.items() if type(found) is int}
                _saturate([row], numbers)
            _json(batch[table])
        _json([row["data"] for row in batch["events"]])

    def _see(self, record: RawRecord, n: int, fact: Event) -> None:
        state = self.cell.state
        evolve(state, fact)
        self.batcher.see(fact)
        self.guard.see(state, fact, state.now_ms)
        self.migrator.see(state, fact, state.now_ms)


def extreme(hint: Any, value: Any, rng: np.random.Generator) -> Any:
    """The value with some of its numbers at an end of their range, or beyond what 64 bits hold where there is
    no end."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(value, Value):
        fields = {
            field.name: extreme(field.type, getattr(value, field.name), rng)
            for field in msgspec.structs.fields(type(value))
        }
        return msgspec.structs.replace(value, **fields)
    if origin in (Union, types.UnionType):
        [inner, *_] = [arg for arg in args if arg is not type(None)]
        return None if value is None else extreme(inner, value, rng)
    if origin is Annotated and args[0] in (int, float) and not isinstance(value, bool):
        return _end(args[0], args[1:], value, rng) if rng.random() < 0.5 else value
    if origin is Annotated:
        return extreme(args[0], value, rng)
    if origin is tuple and isinstance(value, tuple) and args:
        return tuple(extreme(args[0], one, rng) for one in value)
    return value


def _end(kind: type, marks: tuple[Any, ...], value: Any, rng: np.random.Generator) -> Any:
    bounds = [mark for mark in marks if isinstance(mark, Meta)]
    low = next((mark.ge for mark in bounds if mark.ge is not None), None)
    high = next((mark.le for mark in bounds if mark.le is not None), None)
    if high is None and (less := next((mark.lt for mark in bounds if mark.lt is not None), None)) is not None:
        high = less - 1 if kind is int else value
    ends = [value if low is None else low]
    ends += [high] if high is not None else list(UNBOUNDED) if kind is int else [1e300]
    return ends[int(rng.integers(len(ends)))]


def about_this_cell(cell: Recorder, event: Any, rng: np.random.Generator) -> Any:
    """The event with the ids of jobs, tasks and nodes that exist, and the tokens that they have."""
    state, known = cell.state, {}
    jobs = list(state.jobs.values())
    if jobs and not isinstance(event, JobSubmitted):
        job = jobs[int(rng.integers(len(jobs)))]
        tasks = list(job.tasks.values())
        known = {"job_id": job.job_id, "attempt": max(1, job.attempt)}
        if tasks:
            task = tasks[int(rng.integers(len(tasks)))]
            known |= {"token": job.token, "task_id": task.place.task_id, "node_id": task.place.node_id}
    if isinstance(event, JobSubmitted):
        known = {"job_id": f"job-{cell.head.seq}"}
    if isinstance(event, NodeEvent) and "node_id" not in known:
        known["node_id"] = "n1"
    return msgspec.structs.replace(
        event, **{name: found for name, found in known.items() if name in event.__struct_fields__}
    )


def legal(event: Event) -> Event | None:
    """The event as a gateway or a node may send it; None: a rule refuses these ends together."""
    try:
        return decode(wire_type(type(event)), encode(event))
    except EventError:
        return None


def inputs(cell: Recorder, rng: np.random.Generator) -> Iterator[Event]:
    while True:
        event = INPUTS[int(rng.integers(len(INPUTS)))]
        if isinstance(event, NodeJoined | NodeChanged):
            continue  # as the test joins them: an inventory of 2^30 MiB is one of the ends
        try:
            found = legal(extreme(type(event), about_this_cell(cell, event, rng), rng))
        except ValueError:
            continue  # a rule that spans fields
        if found is not None:
            yield found


def submit(cell: CellDriver, rng: np.random.Generator) -> None:
    """A job with ends of ranges in its estimate; it may launch before its GPUs are free."""
    spec = msgspec.structs.replace(job_spec(), model="m", prelaunch=bool(rng.integers(2)))
    need = msgspec.structs.replace(estimate(int(rng.integers(1, 5))), run_ms=600_000, launch_ms=1_000)
    fields = {name: extreme(Milliseconds, getattr(need, name), rng) for name in ("run_ms", "launch_ms")}
    cell.submit(f"own-{cell.head.seq}", spec, msgspec.structs.replace(need, **fields))


def train(cell: CellDriver, job: JobState) -> None:
    """What was placed starts and trains."""
    cell.start(job.job_id)
    for task_id, task in job.tasks.items():
        at = {"token": job.token, "at_ms": cell.now_ms}
        cell.feed(TaskPhaseChanged(node_id=task.place.node_id, task_id=task_id, phase="train", **at))


def tell(cell: CellDriver, job: JobState, rng: np.random.Generator) -> None:
    """How long a job that trains still takes, as the estimator, the node or a broken script says."""
    end = float(rng.choice([1.0, 1e15, 1e18, 1e300]))
    said = eta(job.job_id, cell.now_ms, end, job.attempt)
    progress = JobProgress(job_id=job.job_id, attained_s=1.0, remaining_s=end)
    node_id = next(iter(job.tasks.values())).place.node_id
    cell.feed(said if rng.integers(2) else WorkProgressed(node_id=node_id, jobs=(progress,)))


@pytest.mark.parametrize("seed", range(12))
def test_every_reader_reads_what_follows_from_the_ends_of_ranges(seed: int) -> None:
    """Random inputs, each legal by itself: huge counters, times at the end of time, none at all. Every fold
    is the placer's own."""
    rng = np.random.default_rng(seed)
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 4), node_spec("n2", 2, memory_mib=1 << 30))
    readers, read, stream = Readers(), 0, inputs(cell, rng)
    for turn in range(STEPS):
        for job in list(cell.state.jobs.values()):
            if job.status == JobStatus.LAUNCHING and not awaited(cell.state, job) and rng.random() < 0.7:
                train(cell, job)
            elif job.status == JobStatus.RUNNING and rng.random() < 0.5:
                tell(cell, job, rng)
        if rng.random() < 0.5:
            submit(cell, rng)
        else:
            cell.feed(next(stream))
        cell.at((turn + 1) * int(rng.integers(1, 3)) * 600_000)
        while read < len(cell.values):
            readers.take(cell.values[read], read)
            read += 1
    own = dump(cell.state)
    for reader in (readers.cell, readers.gateway.replica, readers.projection.replica):
        assert dump(reader.state) == own
    assert dump(load(own)) == own, "a snapshot holds these numbers, too"
    assert readers.estimator.head == cell.head
