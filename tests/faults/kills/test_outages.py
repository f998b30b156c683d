"""The servers themselves die under load: broker and database come back, and nothing is lost or done twice."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.rebuild import verify
from tests.faults.conftest import MakeCell
from tests.faults.processes.fault_cell import FaultCell
from tests.faults.processes.judge import judge

AT_ONCE = 8
OUTAGES = 1  # in the CI run; `make faults` multiplies by 30
SERVICES = ("placer", "estimator", "projector", "gateway")


async def live_through(
    cell: FaultCell, outage: Callable[[], Awaitable[None]], outages: int, settings: Settings
) -> None:
    """Load, outages in its middle, rest, judgement. Services may sit an outage out or give up and be
    restarted."""
    services = cell.services(*SERVICES, armed=False)
    for slot in services:
        slot.may_exit = True
    await cell.start(*cell.judges(3), *services)
    submitting = cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE))
    ended = cell.follower.ended
    for _ in range(outages):
        before = len(ended)
        await cell.until(lambda n=before: len(ended) > n + 10, "jobs flow")  # type: ignore[misc]
        await outage()
    before = len(ended)
    await cell.until(lambda: len(ended) > before + 10, "jobs flow again")
    submitting.cancel()
    await cell.rest()
    await cell.projected()
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged, cell.answered)
    found = await verify(settings, cell.log)
    print(f"\n{outages} outages; {verdict.summary()}")
    assert verdict.problems == []
    assert found["ok"], found
    assert cell.crashes == []


@pytest.mark.postgres
async def test_postgres_dies_under_load(make_cell: MakeCell, postgres_folder: Path, scale: int) -> None:
    """The out-of-memory killer takes the database that is log and store at once."""
    server = PostgresServer()
    dsn = await server.start(postgres_folder / "pg")

    async def outage() -> None:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert await server.start(postgres_folder / "pg") == dsn

    try:
        cell = await make_cell(dsn, dsn)
        await live_through(cell, outage, OUTAGES * scale, Settings(log_url=dsn, dsn=dsn))
        await cell.close()
        await cell.log.close()
    finally:
        await server.stop()


@pytest.mark.kafka
@pytest.mark.postgres
async def test_the_broker_dies_under_load(
    make_cell: MakeCell, broker: KafkaBroker, dsn: str, scale: int
) -> None:
    """The only broker is killed and comes back seconds later, several times."""
    cell = await make_cell(broker.url(), dsn)

    async def outage() -> None:
        broker.kill9()
        await asyncio.to_thread(broker.start)

    await live_through(cell, outage, OUTAGES * scale, Settings(log_url=broker.url(), dsn=dsn))
