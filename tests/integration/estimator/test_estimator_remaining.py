"""Remaining times are told beside the estimates of submissions, until they are in the log."""

import asyncio

import pytest

from penstock.errors import NotAllowed
from penstock.model.inputs.estimates import EtaEstimated
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, from_wire
from penstock_services.estimator.shell import publisher
from penstock_services.estimator.shell.service import run
from tests.integration.estimator.test_estimator_learns import answer
from tests.integration.estimator.test_estimator_service import ESTIMATES, SETTINGS, serving
from tests.integration.estimator.test_estimator_steps import Cell, spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog


async def cell(broker: MemoryBroker) -> Cell:
    log = MemoryLog(broker)
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    placer = Cell(log)
    await placer.start_term()
    return placer


async def predicted(broker: MemoryBroker, count: int) -> list[Envelope]:
    """At least so many remaining times."""
    reader = MemoryLog(broker).reader({ESTIMATES: 0})
    found: list[Envelope] = []
    while len(found) < count:
        envelopes = [from_wire(one.headers, one.value, Topic.ESTIMATES) for one in await reader.read()]
        found += [one for one in envelopes if isinstance(one.data, EtaEstimated)]
    await reader.close()
    return found


async def test_an_append_of_unknown_outcome_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker restarts under the estimator's hands: what got there before comes once more, as itself."""
    monkeypatch.setattr(publisher, "FIRST_BACKOFF_S", 0.01)
    broker = MemoryBroker()
    placer = await cell(broker)
    task = await placer.begin("job", spec(64, "ada", 1_000, 1))
    async with serving(placer.log, SETTINGS):
        await answer(placer, placer.log, "other", spec(64, "ada", 1_000, 1))
        broker.fail_next_append(after_write=True)
        broker._faults.insert(0, None)  # type: ignore[arg-type]  # the telling itself gets through
        await placer.steps(task, 100, 100, 50.0)
        found = await predicted(broker, 2)
    assert [one.id for one in found] == [f"eta-{task}-at-100"] * 2
    assert found[0].data == found[1].data


async def test_many_jobs_that_predict_at_once_hold_up_no_submission() -> None:
    """A switch was down for a minute, and the tellings of 300 jobs come in one read."""
    broker = MemoryBroker()
    placer = await cell(broker)
    tasks = [await placer.begin(f"job-{n}", spec(64, "ada", 1_000, 1), f"node-{n}") for n in range(300)]
    async with serving(placer.log, SETTINGS):
        for task in tasks:
            await placer.steps(task, 100, 100, 50.0)
        found = await answer(placer, placer.log, "new", spec(64, "ada", 1_000, 1))
        assert found.job_id == "new"
        etas = await predicted(broker, 300)
    assert len({one.id for one in etas}) == 300


async def test_a_restart_answers_only_what_is_open() -> None:
    """It was down while one job told its steps; the other had been answered, and the placer has committed
    that."""
    broker = MemoryBroker()
    placer = await cell(broker)
    tasks = [await placer.begin(name, spec(64, "ada", 100_000, 1), name) for name in ("answered", "open")]
    async with serving(placer.log, SETTINGS):
        await placer.steps(tasks[0], 100, 100, 50.0)
        [first] = await predicted(broker, 1)
        await placer.record(first.data)
    await placer.steps(tasks[1], 100, 100, 50.0)
    async with serving(placer.log, SETTINGS):
        await predicted(broker, 2)
        await answer(placer, placer.log, "later", spec(64, "ada", 1_000, 1))
    assert [one.correlation_id for one in await predicted(broker, 2)] == ["answered", "open"]


async def test_without_the_right_to_write_it_says_so_and_ends() -> None:
    """The cluster's rights were set up wrongly: no endless retry hides that, here as little as for
    submissions."""
    broker = MemoryBroker()
    placer = await cell(broker)
    task = await placer.begin("job", spec(64, "ada", 1_000, 1))
    await placer.steps(task, 100, 100, 50.0)
    broker.allow = {Topic.ESTIMATES: {"estimator"}}
    with pytest.raises(NotAllowed):
        await run(SETTINGS, asyncio.Event(), log=MemoryLog(broker, "somebody"))
