"""Two machines under one node id, and a machine whose clock has gone back: neither may run what the cell does
not know."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.clock import wall_ms
from penstock.errors import ConfigurationError
from penstock.log.port import Record
from penstock.model.decisions.ledger_events import NodeJoinRefused, TaskLost
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, from_wire
from penstock.runtime.keys.node_keys import PlacerKeys
from penstock.runtime.settings import Settings
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell import node as node_module
from penstock_services.node_reporter.shell.measure import inventory
from penstock_services.node_reporter.shell.run import runner
from penstock_services.placer.core.answer import Input
from penstock_services.placer.core.orders import orders_of
from penstock_services.placer.shell.identity import Identity
from tests.support.cluster.driver import CellDriver, estimate
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, end_tasks, node_options, ours, working
from tests.support.waiting import await_until


class Reports(Cell):
    """With the records as they were read."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.records: list[Record] = []

    async def read(self, timeout_ms: int | None = None) -> None:
        for record in await self._reader.read(timeout_ms=timeout_ms):  # clock: the caller's own bound
            self.records.append(record)
            self.envelopes.append(from_wire(record.headers, record.value, Topic.NODES))


class Placer:
    """The placer's core and its judge of signatures between the reports of one node id and its orders."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.core = CellDriver(PlacerSettings(profile="fifo"))
        self.cell = Reports(MemoryLog(broker, "placer"))
        self.identity = Identity("default", PlacerKeys(b"p" * 32), None)
        self.facts: list[object] = []
        self._fed = 0

    async def until(self, holds: Callable[[], bool]) -> None:
        """Answers reports, one record each, and sends what follows from each, until this holds."""

        async def answered_and_holds() -> bool:
            await self.cell.read(0)
            fresh, self._fed = range(self._fed, len(self.cell.records)), len(self.cell.records)
            for number in fresh:
                await self._take(self.cell.records[number], self.cell.envelopes[number])
            return holds()

        await await_until(answered_and_holds, lambda: f"the end of {self.facts[-10:]}")

    async def _take(self, record: Record, envelope: Envelope) -> None:
        read = Input(*record.partition, record.offset, record.headers, record.value)
        forgery = self.identity.forged(self.core.state, read, envelope)
        if forgery is None:
            await self.feed(envelope.data)
        else:
            await self._order(forgery.facts)

    async def feed(self, event: Event) -> None:
        await self._order(self.core.feed(event).facts)

    async def _order(self, facts: Sequence[Event]) -> None:
        self.facts += facts
        for fact in facts:
            await self.cell.order(*orders_of(self.core.state, fact, self.core.head.seq))

    async def run(self, job_id: str) -> None:
        await self.feed(
            external_events.JobSubmitted(
                job_id=job_id, spec=JobSpec(command=("sleep", "infinity"), grace_ms=0)
            )
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
    return ours(options, "sleep")


def begun(options: Options, broker: MemoryBroker) -> "asyncio.Future[None]":
    """A reporter that is expected to end by itself."""
    log = MemoryLog(broker, "node-reporter")
    return asyncio.ensure_future(runner(options)(Settings(log_url="memory"), asyncio.Event(), log=log))


async def test_a_second_machine_of_the_same_name_is_turned_away_until_the_first_is_fenced(
    first: Options, second: Options, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image was cloned with its node id. Its boot id proves nothing about the first machine, whose job
    goes on.

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
    with pytest.raises(ConfigurationError, match=r"bound to another key.*--node-id.*fence"):
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


async def test_the_first_of_two_clones_makes_way_for_the_second(
    first: Options, second: Options, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine was cloned with its machine id and its state folder: for the cell it has booted anew, and the
    first one's job is lost. The first, which lives, knows that it has not."""
    placer = Placer(broker)
    old = begun(first, broker)
    await placer.until(lambda: NODE in placer.core.state.nodes)
    await placer.run("j1")
    second.state_dir.mkdir(parents=True)
    (second.state_dir / "node.key").write_bytes((first.state_dir / "node.key").read_bytes())
    monkeypatch.setattr(inventory, "boot_id", lambda: "boot-of-the-second")
    clone = replace(second, machine_id=first.machine_id)
    async with working(clone, MemoryLog(broker, "node-reporter")):
        await placer.until(old.done)
        with pytest.raises(ConfigurationError, match="booted as boot-of-the-second"):
            await old
        assert sleeping(first) == []
        await placer.until(lambda: placer.core.job("j1").status is JobStatus.RUNNING)
        assert len(sleeping(clone)) == 1


async def test_a_node_that_joins_with_a_clock_gone_back_joins_again(
    first: Options, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock was an hour ahead, then its journal was lost: its joinings look like copies of old ones."""
    placer = Placer(broker)
    hour_ms = 3_600_000
    with monkeypatch.context() as ahead:
        ahead.setattr(node_module, "wall_ms", lambda: wall_ms() + hour_ms)
        async with working(first, MemoryLog(broker, "node-reporter")):
            await placer.until(lambda: NODE in placer.core.state.nodes)
    before = placer.core.state.nodes[NODE].incarnation
    (first.state_dir / "journal.sqlite").unlink()
    async with working(first, MemoryLog(broker, "node-reporter")):
        await placer.until(lambda: placer.core.state.nodes[NODE].incarnation > before)
        await placer.run("j1")
    refused = [fact for fact in placer.facts if isinstance(fact, NodeJoinRefused)]
    assert [fact.reason for fact in refused] == ["stale_join"]
    assert placer.core.state.nodes[NODE].incarnation == before + 1
