"""Two machines under one node id, and a machine whose clock has gone back: neither may run what the cell does not know."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.clock import wall_ms
from penstock.errors import ConfigurationError
from penstock.model import external_events
from penstock.model.estimates import JobEstimated
from penstock.model.event import Event
from penstock.model.ledger_events import NodeJoinRefused, PlacerSettings, TaskLost
from penstock.model.transitions import JobStatus, NodeStatus
from penstock.model.types import JobSpec
from penstock.runtime.settings import Settings
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell import inventory
from penstock_services.node_reporter.shell import node as node_module
from penstock_services.node_reporter.shell.run import runner
from penstock_services.placer.core.orders import orders_of
from tests.support import node_fixtures
from tests.support.driver import CellDriver, estimate
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import NODE, WAIT_S, Cell, end_tasks, node_options, ours, working


class Placer:
    """The placer's core between the reports of one node id and its orders."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.core = CellDriver(PlacerSettings(profile="fifo"))
        self.cell = Cell(MemoryLog(broker, "placer"))
        self.facts: list[object] = []
        self._fed = 0

    async def until(self, holds: Callable[[], bool]) -> None:
        """Answers reports, one record each, and sends what follows from each, until this holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                fresh, self._fed = self.cell.events()[self._fed :], len(self.cell.envelopes)
                for event in fresh:
                    await self.feed(event)
                await self.cell.read(50)

    async def feed(self, event: Event) -> None:
        step = self.core.feed(event)
        self.facts += step.facts
        for fact in step.facts:
            await self.cell.order(*orders_of(self.core.state, fact, self.core.head.seq))

    async def run(self, job_id: str) -> None:
        await self.feed(
            external_events.JobSubmitted(job_id=job_id, spec=JobSpec(command=("sleep", "600"), grace_ms=0))
        )
        await self.feed(JobEstimated(job_id=job_id, estimate=estimate(1, cores=1, memory_mib=0)))
        await self.until(lambda: self.core.job(job_id).status is JobStatus.RUNNING)


broker = node_fixtures.broker


def machine(tmp_path: Path, name: str) -> Options:
    return node_options(tmp_path / name, machine_id=name, drain_grace_ms=100)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Options]:
    yield from cleaned(machine(tmp_path, "first"))


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Options]:
    yield from cleaned(machine(tmp_path, "second"))


def cleaned(options: Options) -> Iterator[Options]:
    yield options
    end_tasks(options)


def sleeping(options: Options) -> list[psutil.Process]:
    """Its tasks' programs."""
    return [process for process in ours(options) if process.name() == "sleep"]


def begun(options: Options, broker: MemoryBroker) -> "asyncio.Future[None]":
    """A reporter that is expected to end by itself."""
    log = MemoryLog(broker, "node-reporter")
    return asyncio.ensure_future(runner(options)(Settings(log_url="memory"), asyncio.Event(), log=log))


async def test_a_second_machine_of_the_same_name_is_turned_away_until_the_first_is_fenced(
    first: Options, second: Options, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image was cloned with its node id. Its boot id proves nothing about the first machine, whose job goes on.

    Then an operator fences the first one, which lives: it reads that another is the node now, and makes way.
    """
    placer = Placer(broker)
    state = placer.core.state
    old = begun(first, broker)
    await placer.until(lambda: NODE in state.nodes)
    await placer.run("j1")
    monkeypatch.setattr(inventory, "boot_id", lambda: "boot-of-the-second")
    new = begun(second, broker)
    await placer.until(new.done)
    with pytest.raises(ConfigurationError, match=r"another machine's: first has it.*--node-id"):
        await new
    assert (len(sleeping(first)), sleeping(second)) == (1, [])
    assert state.jobs["j1"].status is JobStatus.RUNNING
    assert not [fact for fact in placer.facts if isinstance(fact, TaskLost)]
    boot_id = state.nodes[NODE].spec.boot_id
    await placer.feed(external_events.NodeLeft(node_id=NODE, boot_id=boot_id, proof="fenced"))
    assert state.nodes[NODE].status is NodeStatus.GONE
    async with working(second, MemoryLog(broker, "node-reporter")):
        await placer.until(old.done)
        with pytest.raises(ConfigurationError, match="another machine's: second has joined"):
            await old
        assert sleeping(first) == []
        await placer.until(lambda: state.jobs["j1"].status is JobStatus.RUNNING)
        assert len(sleeping(second)) == 1


async def test_a_node_that_joins_with_a_clock_gone_back_joins_again(
    first: Options, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock was an hour ahead, then its disk was replaced: its joinings look like copies of old ones."""
    placer = Placer(broker)
    hour_ms = 3_600_000
    with monkeypatch.context() as ahead:
        ahead.setattr(node_module, "wall_ms", lambda: wall_ms() + hour_ms)
        async with working(first, MemoryLog(broker, "node-reporter")):
            await placer.until(lambda: NODE in placer.core.state.nodes)
    before = placer.core.state.nodes[NODE].incarnation
    async with working(replace(first, state_dir=first.state_dir / "new"), MemoryLog(broker, "node-reporter")):
        await placer.until(lambda: placer.core.state.nodes[NODE].incarnation > before)
        await placer.run("j1")
    refused = [fact for fact in placer.facts if isinstance(fact, NodeJoinRefused)]
    assert [fact.reason for fact in refused] == ["stale_join"]
    assert placer.core.state.nodes[NODE].incarnation == before + 1
