"""The gateway's alarm about decisions: a fresh decider decides a record otherwise, and later decides as the
placer did."""

import asyncio
from typing import Any

import pytest

from penstock.ledger.replica.replica import Replica
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock_services.gateway.shell.replica import alarms
from penstock_services.gateway.shell.replica.alarms import Alarms
from penstock_services.gateway.shell.replica.differences import Differences
from penstock_services.gateway.shell.replica.follower import Follower
from tests.support.cluster.hand_placer import HandPlacer, estimate, node_spec
from tests.support.installation.services import while_alive
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.waiting import await_until


def broker_of_letters() -> MemoryBroker:
    """Without any letter yet."""
    broker = MemoryBroker()
    broker.create({Topic.DEAD_LETTERS: 1})
    return broker


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
    found = Alarms(follower, decides_again, Differences(MemoryLog(broker_of_letters()), 0, follower))
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


async def test_a_job_that_no_estimator_answers_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimator's machine is scrapped: jobs are accepted, and none of them would ever start or be told
    why."""
    monkeypatch.setattr(alarms, "ESTIMATED_WITHIN_MS", -1)
    monkeypatch.setattr(alarms, "SETTLES_S", 0.0)

    async def decides_again() -> Any:
        raise AssertionError("not in so few records")

    placer, follower = HandPlacer(), Follower(Replica())
    found = Alarms(follower, decides_again, Differences(MemoryLog(broker_of_letters()), 0, follower))
    watching = asyncio.create_task(found.watch())

    async def read(*, alarm: bool) -> None:
        for offset in range(follower.replica.offset, len(placer.values)):
            follower.replica.take(placer.values[offset], offset)
        follower.wake()
        await while_alive(
            await_until(lambda: (found.current is not None) is alarm, lambda: f"{found.current}"), watching
        )

    placer.feed(JobSubmitted(job_id="j", spec=JobSpec(command=("true",))))
    await read(alarm=True)
    assert found.current is not None
    assert (found.current.job_id, found.current.cause.partition(",")[0]) == (
        "j",
        "no estimator has answered its submission",
    )
    placer.feed(JobEstimated(job_id="j", estimate=estimate()))
    await read(alarm=False)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
