"""What a placer writes about inputs at the ends of their legal ranges, read by the core of every real reader."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from infra.codegen.examples import EXAMPLES
from penstock.ledger.evolve import evolve
from penstock.ledger.record import RawRecord
from penstock.ledger.replica import Replica
from penstock.ledger.snapshot import dump, load
from penstock.model.codec import decode, encode
from penstock.model.errors import EventError
from penstock.model.event import Event, wire_type
from penstock.model.external_events import JobSubmitted, NodeChanged, NodeEvent, NodeJoined
from penstock.model.settings import PlacerSettings
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.model.types import MAX_MS, Value
from penstock_services.batcher.core.batcher import Batcher
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.estimator.core.state import State
from penstock_services.gateway.shell.follower import Follower
from penstock_services.migrator.core.migrator import Migrator
from penstock_services.placer.core.recorder import Recorder
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import LARGEST, REPLACED, _json, _saturate
from tests.support.driver import CellDriver, node_spec

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
    """The value with some of its numbers at an end of their range, or beyond what 64 bits hold where there is no end."""
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
        return _end(args[0], args[1:], value, rng) if rng.random() < 0.3 else value
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


@pytest.mark.parametrize("seed", range(12))
def test_every_reader_reads_what_follows_from_the_ends_of_ranges(seed: int) -> None:
    """Random inputs, each legal by itself: huge counters, times at the end of time, none at all. Every fold is the placer's own."""
    rng = np.random.default_rng(seed)
    values: list[bytes] = []
    cell = CellDriver(PlacerSettings(profile="penstock"))
    values = cell.values
    cell.join(node_spec("n1", 4), node_spec("n2", 2, memory_mib=1 << 30))
    cell.submit("first")
    readers, read = Readers(), 0
    stream = inputs(cell, rng)
    for _ in range(STEPS):
        cell.now_ms = min(MAX_MS, cell.now_ms + int(rng.integers(1, 10_000)))
        cell.feed(next(stream))
        for job_id, job in list(cell.state.jobs.items()):
            if job.tasks and rng.random() < 0.3 and job.placed_ms is not None and job.running_ms is None:
                cell.start(job_id)
        while read < len(values):
            readers.take(values[read], read)
            read += 1
    own = dump(cell.state)
    for reader in (readers.cell, readers.gateway.replica, readers.projection.replica):
        assert dump(reader.state) == own
    assert dump(load(own)) == own, "a snapshot holds these numbers, too"
    assert readers.estimator.head == cell.head
