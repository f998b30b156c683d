"""Kill -9 of every service, at named points and at random moments, under a stream of real jobs."""

import asyncio

import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.runtime.failpoints import NAMES
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.rebuild import verify
from tests.faults.conftest import MakeCell
from tests.faults.processes.fault_cell import FaultCell
from tests.faults.processes.judge import Verdict, judge
from tests.faults.processes.slots import Slot

EMBEDDED_KILLS = 30  # in the CI run; `make faults` multiplies by 30
KAFKA_KILLS = 20
NODE_KILLS = 12
# jobs under way: enough that each failpoint is passed often, and the machine waits for deaths, not for jobs
AT_ONCE = 8
MACHINES_LIVE = 8  # times as long as services
SERVICES = ("placer", "estimator", "projector", "gateway")


def names_of(*prefixes: str) -> set[str]:
    """The failpoints of these services."""
    return {name for name in NAMES if name.partition(".")[0] in prefixes}


async def kill_and_judge(
    cell: FaultCell, kills: int, nodes: list[Slot], to_visit: set[str], log_url: str, dsn: str
) -> Verdict:
    """Kills until enough died and every point was visited, lets everything come to rest, then asks the
    judge."""
    services = cell.services(*SERVICES)
    await cell.start(*nodes, *services)
    armed = [slot.name for slot in (*nodes, *services) if slot.failpoints is not None]
    machines = [slot.name for slot in nodes if slot.failpoints is None]
    busy = [
        cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE)),
        cell.background(cell.kill_at_random(armed)),
    ]
    if machines:
        busy.append(cell.background(cell.kill_at_random(machines, "machine", MACHINES_LIVE)))
    await cell.until(
        lambda: cell.service_kills >= kills and to_visit <= set(cell.kills),
        f"{kills} kills, {to_visit} visited",
    )
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    cell.disarm()
    await cell.rest()
    await cell.projected()
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged, cell.answered)
    found = await verify(Settings(log_url=log_url, dsn=dsn), cell.log)
    print(f"\n{cell.service_kills} kills, {dict(sorted(cell.kills.items()))}\n{verdict.summary()}")
    assert verdict.problems == []
    assert found["ok"], found
    assert found["seq"] == verdict.replica.head.seq
    assert cell.crashes == []
    return verdict


@pytest.mark.postgres
async def test_kills_on_the_embedded_log(make_cell: MakeCell, dsn: str, scale: int) -> None:
    """A machine room with a bad day: something dies several times a second, thirty times."""
    cell = await make_cell(dsn, dsn)
    await kill_and_judge(cell, EMBEDDED_KILLS * scale, cell.judges(3), names_of(*SERVICES), dsn, dsn)


# tests/integration/node_reporter/process/test_node_reporter_kills.py kills one at each of its failpoints
@pytest.mark.slow
@pytest.mark.postgres
async def test_kills_of_node_reporters(make_cell: MakeCell, dsn: str, scale: int) -> None:
    """The real node-reporters die as often as the rest; their tasks run on and are found again."""
    cell = await make_cell(dsn, dsn)
    await kill_and_judge(cell, NODE_KILLS * scale, cell.nodes(2), names_of("node"), dsn, dsn)


@pytest.mark.kafka
@pytest.mark.postgres
async def test_kills_on_kafka(make_cell: MakeCell, broker: KafkaBroker, dsn: str, scale: int) -> None:
    """The same on the log that clusters use."""
    cell = await make_cell(broker.url(), dsn)
    await kill_and_judge(cell, KAFKA_KILLS * scale, cell.judges(3), names_of(*SERVICES), broker.url(), dsn)
