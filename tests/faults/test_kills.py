"""Kill -9 of every service, at named points and at random moments, under a stream of real jobs."""

import pytest

from penstock.testing.fault_cell import FaultCell, Slot, failpoint_cycle
from penstock.testing.judge import judge
from penstock.testing.kafka import KafkaBroker

from .conftest import MakeCell

EMBEDDED_KILLS = 210
KAFKA_KILLS = 60
AT_ONCE = 24
PATIENCE_S = 100.0


def services(cell: FaultCell) -> list[Slot]:
    """The placer and the estimator, each armed with its failpoints in turn."""
    return [
        Slot(name, f"penstock.{name}", failpoints=failpoint_cycle(name, cell.rng))
        for name in ("placer", "estimator")
    ]


async def kill_and_judge(cell: FaultCell, kills: int) -> None:
    """Kills until enough died, lets everything come to rest, then asks the judge."""
    armed = services(cell)
    await cell.start(*cell.judges(3), *armed)
    submitting = cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE))
    killing = cell.background(cell.kill_at_random([slot.name for slot in armed], 0.2, 0.6))
    await cell.until(lambda: cell.kills.total() >= kills, PATIENCE_S, f"{kills} kills")
    for task in (submitting, killing):
        task.cancel()
    cell.disarm()
    await cell.settle(PATIENCE_S)
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged)
    print(f"\n{cell.kills.total()} kills {dict(sorted(cell.kills.items()))}\n{verdict.summary()}")
    assert verdict.problems == []
    assert cell.crashes == []


@pytest.mark.postgres
@pytest.mark.timeout(240)
async def test_kills_on_the_embedded_log(make_cell: MakeCell, dsn: str, scale: int) -> None:
    """A machine room with a bad day: something dies several times a second, for half a minute."""
    cell = await make_cell(dsn, dsn)
    await kill_and_judge(cell, EMBEDDED_KILLS * scale)


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.timeout(240)
async def test_kills_on_kafka(make_cell: MakeCell, broker: KafkaBroker, dsn: str, scale: int) -> None:
    cell = await make_cell(broker.url(), dsn)
    await kill_and_judge(cell, KAFKA_KILLS * scale)
