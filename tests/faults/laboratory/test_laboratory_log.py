"""The laboratory's log keeps the promises of `penstock.log.port`, in Kafka's manner and in the embedded
log's."""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Callable

import pytest

from penstock.errors import AppendFailed, OffsetTaken
from penstock.log.port import Message, Partition
from penstock.model.schema.topics import Topic
from tests.faults.laboratory.machines.log import Broker, Connection
from tests.faults.laboratory.machines.process import Clock, Process, Service
from tests.faults.laboratory.world import Rates, World
from tests.support.log.log_conformance import LogConformance
from tests.support.virtual_time import run_virtually

LEDGER, ORDERS = Partition(Topic.LEDGER, 0), Partition(Topic.ORDERS, 0)
CONFORMANCE = (
    "test_order_and_offsets",
    "test_a_record_that_must_get_an_offset",
    "test_position_outside_the_log",
    "test_slow_reader_next_to_a_fast_one",
)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", CONFORMANCE)
def test_conformance(name: str, *, conditional: bool) -> None:
    """What it tests services with must not promise more, or less, than the real logs do."""

    async def conform() -> None:
        world = World(1, Rates())
        world.calm = True
        broker = Broker(world, lambda record: None, conditional=conditional)

        async def factory(_: str) -> Connection:
            return Connection(broker)

        await getattr(LogConformance(), name)(factory, "conformance")

    run_virtually(conform())


def _append_all(rates: Rates, act: Callable[[Process], None]) -> tuple[int, int, set[str]]:
    """(records, orders, errors) after commits of one record and one order, while `act` happens to their
    writer."""

    async def run() -> tuple[int, int, set[str]]:
        world = World(7, rates)
        broker = Broker(world, lambda record: None, conditional=True)
        errors: set[str] = set()

        async def work(process: Process) -> None:
            log = Connection(broker, process)
            while True:
                at = (await log.end_offsets([LEDGER]))[LEDGER]
                try:
                    await log.append([Message(LEDGER, b"record", at=at), Message(ORDERS, b"order")])
                except AppendFailed as error:
                    errors.add(type(error).__name__)

        services = [Service(world, f"writer {n}", Clock(), work, 1.0) for n in range(2)]
        for service in services:
            service.start()
        for _ in range(200):
            await asyncio.sleep(0.5)
            process = services[0].process
            if process is not None and process.alive:
                act(process)
        for service in services:
            service.enabled = False
            service.kill("the test is over")
        await asyncio.sleep(10.0)
        return broker.end(LEDGER), broker.end(ORDERS), errors

    return run_virtually(run())


def test_a_commit_is_whole_or_not_at_all() -> None:
    """Two placers append, one is killed again and again, acknowledgements are lost, commits come late."""
    records, orders, errors = _append_all(
        Rates(append=0.2, late=0.2), lambda process: process.kill("a crash")
    )
    assert records == orders > 100
    assert errors == {AppendFailed.__name__, OffsetTaken.__name__}
