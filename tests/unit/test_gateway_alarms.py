"""The gateway's alarm about decisions: a fresh decider decides a record otherwise, and later decides as the placer did."""

import asyncio
from typing import Any

import pytest

from penstock.ledger.replica import Replica
from penstock_services.gateway.shell import alarms
from penstock_services.gateway.shell.alarms import Alarms
from penstock_services.gateway.shell.differences import Differences
from penstock_services.gateway.shell.follower import Follower
from tests.support.hand_placer import HandPlacer, node_spec
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.services import while_alive
from tests.support.waiting import await_until


async def test_decisions_that_rest_on_more_than_the_ledger_are_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first repetition finds a difference, the second cannot be made, the third finds none."""
    monkeypatch.setattr(alarms, "FRESH_EVERY", 2)
    monkeypatch.setattr(alarms, "SETTLES_S", 0.0)
    reports: list[Any] = [
        {"differences": [{"seq": 3, "field": "facts"}]},
        LookupError("an input is gone"),
        {"differences": []},
    ]
    repeated = 0

    async def decides_again() -> Any:
        nonlocal repeated
        repeated += 1
        report = reports[repeated - 1]
        if isinstance(report, Exception):
            raise report
        return report

    placer, follower = HandPlacer(), Follower(Replica())
    found = Alarms(follower, decides_again, Differences(MemoryLog(MemoryBroker()), 0, follower))
    watching = asyncio.create_task(found.watch())

    def reads_on() -> None:
        placer.join(node_spec(f"n{follower.replica.offset}"))
        for offset in range(follower.replica.offset, len(placer.values)):
            follower.replica.take(placer.values[offset], offset)
        follower.wake()

    def repeats(number: int) -> bool:
        """Records come until the decisions were repeated so often."""
        if repeated < number:
            reads_on()
        return repeated == number

    async def repeat(number: int) -> None:
        await while_alive(await_until(lambda: repeats(number), lambda: f"repetition {number}"), watching)

    async def stands(alarm: bool) -> None:
        follower.wake()
        await while_alive(
            await_until(lambda: (found.current is not None) is alarm, lambda: f"{found.current}"),
            watching,
        )

    await repeat(1)
    await stands(True)
    assert found.current is not None
    assert "decides record 3 otherwise (its facts)" in found.current.cause
    await repeat(2)
    await stands(True)
    await repeat(3)
    await stands(False)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
