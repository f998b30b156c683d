"""The batcher's shell on the log in memory: what it does when the log or its worker is not as it should
be."""

# clocks: the whole file runs in virtual time

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from penstock.errors import LogError
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import Topic
from penstock.runtime.following.ledger_follower import MAX_VOIDS
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.batcher.core.batcher import Work, solve
from penstock_services.batcher.shell import service
from penstock_services.batcher.shell.service import Planner
from penstock_services.batcher.shell.worker import Worker
from tests.support.batching.small_stages import FirstFitRegroup, known_as
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.unit.virtually import virtually

LEDGER, PROPOSALS = Partition(Topic.LEDGER, 0), Partition(Topic.PROPOSALS, 0)


class SameProcess(Worker):
    """Plans here; `fails` raises instead, so often."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails

    def warm_up(self) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def solve(self, work: Work) -> object:
        if self.fails:
            self.fails -= 1
            raise ArithmeticError("a bug")
        return solve(work)


class StuckLog(MemoryLog):
    """Its appends never end."""

    async def append(self, messages: Sequence[Message]) -> list[int]:
        await asyncio.sleep(3_600)
        return await super().append(messages)


def full_cell(broker: MemoryBroker) -> CellDriver:
    """A ledger of one node, a job that has all of it and one that waits, in the broker."""
    with known_as("small-groups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(msgspec.structs.replace(settings))
        cell.join(node_spec("n1"))
        for name in ("j0", "j1"):
            cell.submit(name, need=estimate(4))
    broker.append("placer", [Message(LEDGER, value) for value in cell.values])
    return cell


@pytest.fixture
def broker() -> MemoryBroker:
    found = MemoryBroker()
    found.create(topic_partitions())
    return found


def planner(log: MemoryLog, worker: Worker) -> Planner:
    return Planner(Settings(log_url="memory"), log, Tracing(), worker, Replica())


async def proposed(broker: MemoryBroker) -> int:
    while not broker.records(PROPOSALS):
        await broker.changed(None)
    return len(broker.records(PROPOSALS))


@virtually
async def test_a_bug_in_a_stage_costs_that_plan_and_no_other(broker: MemoryBroker) -> None:
    """The first answer raises. The service goes on, and plans when the next job comes."""
    cell = full_cell(broker)
    with known_as("small-groups", regroup=FirstFitRegroup()):
        ready = asyncio.Event()
        work = asyncio.ensure_future(planner(MemoryLog(broker), SameProcess(fails=1)).work(ready))
        await ready.wait()
        await asyncio.sleep(0.1)
        assert not broker.records(PROPOSALS)
        known = len(cell.values)
        cell.submit("j2", need=estimate(4))
        broker.append("placer", [Message(LEDGER, value) for value in cell.values[known:]])
        assert await proposed(broker) == 1
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@virtually
async def test_a_ledger_that_goes_on_otherwise_is_folded_anew(broker: MemoryBroker) -> None:
    """It was restored from an older copy, and is by now longer than what was read: nothing in it follows what
    the batcher has."""
    full_cell(broker)
    with known_as("small-groups", regroup=FirstFitRegroup()):
        work = asyncio.ensure_future(planner(MemoryLog(broker), SameProcess()).work(asyncio.Event()))
        await proposed(broker)
        broker.append("another", [Message(LEDGER, b"other history")] * (MAX_VOIDS + 1))
        with pytest.raises(LogError, match="do not follow"):
            await work


@virtually
async def test_while_an_append_is_under_way_it_does_not_look_again_and_again(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log does not answer for long, by which time another plan would be due: the loop sleeps until it
    has."""
    cell = full_cell(broker)
    looks = 0
    due_ms = service.Batcher.due_ms

    def counted(batcher: service.Batcher, state: object) -> int | None:
        nonlocal looks
        looks += 1
        return due_ms(batcher, state)  # type: ignore[arg-type]

    monkeypatch.setattr(service.Batcher, "due_ms", counted)
    monkeypatch.setattr("penstock_services.batcher.core.batcher.ANSWER_WITHIN_MS", 0)
    with known_as("small-groups", regroup=FirstFitRegroup()):
        ready = asyncio.Event()
        work = asyncio.ensure_future(planner(StuckLog(broker), SameProcess()).work(ready))
        await ready.wait()
        await asyncio.sleep(0.1)
        known = len(cell.values)
        cell.submit("j2", need=estimate(4))
        broker.append("placer", [Message(LEDGER, value) for value in cell.values[known:]])
        await asyncio.sleep(0.3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert looks < 20
