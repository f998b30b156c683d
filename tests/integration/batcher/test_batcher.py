"""The batcher as a process beside a placer, on Kafka under its own identity and on the embedded log: killed,
hung, late."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from infra.devservers.kafka import kafka_broker
from penstock.clock import LedgerClock
from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.proposals import PlanProposed
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.shell import ledger_time
from penstock_services.placer.shell.service import run as run_placer
from tests.support.batching.small_batcher import PROFILE
from tests.support.batching.small_stages import FirstFitBatch, known_as
from tests.support.cluster.driver import node_spec
from tests.support.installation.services import while_alive
from tests.support.node_reporter.fake_nodes import FakeNodes
from tests.support.story import told
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

WINDOW_MS = 200
ARRIVALS = 4
NEVER_MS = 86_400_000
CELLS = 16  # more than tests on one broker
_cells = itertools.count()
KINDS = (BatchWindowOpened, BatchWindowClosed, PlacementDecided, ProposalAnswered)


class Clock:
    """The ledger's time for its placer: it stands still until the test moves it, so that no window is over by
    chance."""

    passed_s = 0.0

    def of_term(self, start_ms: int) -> LedgerClock:
        return LedgerClock(start_ms, elapsed_s=lambda: self.passed_s, wall=lambda: 0)

    def skip_a_window(self) -> None:
        self.passed_s += (WINDOW_MS + 1) / 1_000


class Cell:
    """Placer, estimator and three nodes of eight GPUs in this process, each with a log of its own; the
    batcher is a process.

    Of the cells on one log each has partitions of its own.
    """

    def __init__(self, url: Callable[[str], str], index: int = 0) -> None:
        self.url = url
        self.settings = Settings(log_url="given", cell=f"c{index}", cell_index=index)
        self.ledger, self.proposals, self.jobs = (
            Partition(topic, index) for topic in (Topic.LEDGER, Topic.PROPOSALS, Topic.JOBS)
        )
        self.replica = Replica()
        self.facts: list[Any] = []
        """Those of `KINDS`, in the ledger's order."""
        self.clock = Clock()
        self._sent = 0
        self._services: list[asyncio.Future[Any]] = []

    async def start(self, stack: AsyncExitStack) -> None:
        self.log = await self._open("gateway", stack)
        self._reader = self.log.reader({self.ledger: 0})
        stack.push_async_callback(self._reader.close)
        stop = asyncio.Event()
        settings, index = self.settings, self.settings.cell_index
        ready = asyncio.Event()
        nodes = FakeNodes(
            await self._open("node-reporter", stack),
            [node_spec(f"{settings.cell}-n{number}", gpus=8) for number in range(3)],
            index,
            run_ms=NEVER_MS,
        )
        tasks = [
            asyncio.create_task(
                run_placer(settings, stop, log=await self._open("placer", stack), ready=ready)
            ),
            asyncio.create_task(run_estimator(settings, stop, log=await self._open("estimator", stack))),
        ]
        joined = asyncio.create_task(nodes.run())

        async def end() -> None:
            stop.set()
            joined.cancel()
            await asyncio.gather(*tasks, joined, return_exceptions=True)
            assert nodes.seen.collisions == []

        stack.push_async_callback(end)
        self._services += tasks
        await while_alive(ready.wait(), *tasks)
        await self.until(lambda: len(self.replica.state.nodes) == 3)

    async def _open(self, identity: str, stack: AsyncExitStack) -> Log:
        log = await open_log(self.url(identity), identity).start()
        stack.push_async_callback(log.close)
        return log

    @asynccontextmanager
    async def batcher(self, gate: str = "", **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """A ready batcher, killed at the end if it still lives. `gate`: its plans wait for this file."""
        found = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_BATCH")}
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.batching.small_batcher",
            gate,
            env={**found, **self.settings.environment(), "PENSTOCK_LOG": self.url("batcher"), **env},
            stdout=asyncio.subprocess.PIPE,
        )
        life = asyncio.create_task(child.wait(), name="batcher")
        self._services.append(life)
        try:
            assert child.stdout is not None
            assert await child.stdout.readline() == b"ready\n"
            yield child
        finally:
            self._services.remove(life)
            if child.returncode is None:
                child.kill()
            await life

    async def burst(self, jobs: int = 6) -> list[str]:
        """So many jobs at once, long after all others; returns the ids."""
        messages, names = [], []
        self.clock.skip_a_window()
        for _ in range(jobs):
            self._sent += 1
            names.append(f"j{self._sent}")
            need = ResourceRequest(gpus=1, cores=1, host_memory_mib=64, gpu_memory_mib=64, bandwidth_mbps=0)
            event = JobSubmitted(job_id=names[-1], spec=JobSpec(command=("true",), resources=need))
            headers, value = to_wire(Envelope(f"submit-{names[-1]}", "/test", 1, event))
            messages.append(Message(self.jobs, value, headers))
        await self.log.append(messages)
        return names

    async def until(self, holds: Callable[[], object]) -> None:
        """Folds until it is so."""
        while not holds():
            for record in await while_alive(self._reader.read(), *self._services):
                self.replica.take(record.value, record.offset, self._fold)
        assert check(self.replica.state) == []

    def _fold(self, record: RawRecord, n: int, fact: Any) -> None:
        evolve(self.replica.state, fact)
        if isinstance(fact, KINDS):
            self.facts.append(fact)

    def of(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    async def until_running(self, names: list[str]) -> None:
        await self.until(lambda: {fact.job_id for fact in self.of(PlacementDecided)} >= set(names))

    def planned(self) -> set[str]:
        """Jobs placed by the batcher's plans."""
        return {fact.job_id for fact in self.of(PlacementDecided) if fact.unit is not None}

    async def sent(self) -> list[Message]:
        """What is on the proposals' topic, as it could be sent again."""
        end = (await self.log.end_offsets([self.proposals]))[self.proposals]
        reader = self.log.reader({self.proposals: 0})
        found: list[Message] = []
        while reader.position(self.proposals) < end:
            found += [
                Message(self.proposals, each.value, each.headers, each.key) for each in await reader.read()
            ]
        await reader.close()
        return found


@pytest.fixture(scope="module")
def kafka_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Of each identity."""
    with kafka_broker(tmp_path_factory.mktemp("kafka"), security="scram") as broker:
        broker.create_topics(topic_partitions(CELLS))
        yield broker.url


@pytest_asyncio.fixture(
    params=["embedded", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.slow])]
)
async def cell(
    request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cell]:
    """With windows that four arrivals open, and that the test ends: the placer's clock is its own."""
    monkeypatch.setenv("PENSTOCK_PROFILE", PROFILE)
    monkeypatch.setenv("PENSTOCK_BATCH_WINDOW_MS", str(WINDOW_MS))
    monkeypatch.setenv("PENSTOCK_BATCH_ARRIVALS", str(ARRIVALS))
    async with AsyncExitStack() as stack:
        if request.param == "kafka":
            request.getfixturevalue("patient_kafka")
            cell = Cell(request.getfixturevalue("kafka_url"), next(_cells))
        else:
            log = await open_log(dsn, "test").start()
            await log.create(topic_partitions())
            await log.close()
            cell = Cell(lambda _: dsn)
        monkeypatch.setattr(ledger_time, "LedgerClock", cell.clock.of_term)
        stack.enter_context(told("the ledger's last facts", lambda: "\n".join(map(str, cell.facts[-40:]))))
        stack.enter_context(known_as(PROFILE, batch=FirstFitBatch()))
        await cell.start(stack)
        yield cell


@pytest.mark.parametrize("cell", ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
async def test_a_burst_is_planned_by_the_batcher(cell: Cell) -> None:
    """Six jobs at once: from the fourth on they wait, and one plan places them before the window is over.
    SIGTERM ends it with 0."""
    async with cell.batcher() as batcher:
        await cell.until_running(await cell.burst())
        assert [fact.reason for fact in cell.of(BatchWindowClosed)] == ["answered"]
        assert cell.planned() == {"j4", "j5", "j6"}
        [answer] = cell.of(ProposalAnswered)
        assert (answer.proposer, answer.verdict, answer.started) == ("batcher", "accepted", 3)
        batcher.terminate()
        assert await batcher.wait() == 0


@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param("batcher.question_asked", marks=pytest.mark.slow),
        "batcher.plan_solved",
        "batcher.plan_sent",
    ],
)
async def test_a_batcher_that_dies_costs_its_window_and_no_more(cell: Cell, failpoint: str) -> None:
    """kill -9 while it plans, or right after: everybody runs when the window is over at the latest. The next
    one plans the next burst."""
    async with cell.batcher(PENSTOCK_FAILPOINT=f"{failpoint}:1") as victim:
        names = await cell.burst()
        assert await victim.wait() == -signal.SIGKILL
    sent = failpoint == "batcher.plan_sent"
    if not sent:
        cell.clock.skip_a_window()
    await cell.until_running(names)
    assert [fact.reason for fact in cell.of(BatchWindowClosed)] == ["answered" if sent else "over"]
    async with cell.batcher():
        await cell.until_running(await cell.burst())
    assert cell.planned() >= {"j10", "j11", "j12"}


async def test_a_batcher_that_hangs_costs_its_window_and_no_more(cell: Cell, tmp_path: Path) -> None:
    """SIGSTOP while it plans: all run when the window is over. When it goes on, its plan is late, and changes
    nothing."""
    gate = tmp_path / "plan"
    async with cell.batcher(str(gate)) as batcher:
        names = await cell.burst()
        await await_until(gate.with_suffix(".asked").exists, "the batcher's question")
        batcher.send_signal(signal.SIGSTOP)
        cell.clock.skip_a_window()
        await cell.until_running(names)
        assert [fact.reason for fact in cell.of(BatchWindowClosed)] == ["over"]
        gate.touch()
        batcher.send_signal(signal.SIGCONT)
        await cell.until_running(await cell.burst())
    assert all(fact.verdict == "refused" for fact in cell.of(ProposalAnswered)[:-1])
    assert cell.of(BatchWindowClosed)[-1].reason == "answered"
    assert not cell.planned() & set(names)


async def test_what_comes_late_twice_or_makes_no_sense_is_refused_and_recorded(cell: Cell) -> None:
    """A copy of a plan that was done, one from an earlier window, jobs and nodes that nobody knows, and bytes
    that are not an event."""
    async with cell.batcher():
        await cell.until_running(await cell.burst())
    [plan] = await cell.sent()
    cell.clock.skip_a_window()
    proposed = from_wire(plan.headers, plan.value).data
    assert isinstance(proposed, PlanProposed)
    async with AsyncExitStack() as stack:
        log = await cell._open("batcher", stack)
        for number, changed in enumerate(
            ({"proposal_id": "late"}, {"proposal_id": "ghosts", "valid_until_ms": None, "read": ()})
        ):
            event = msgspec.structs.replace(proposed, **changed)
            headers, value = to_wire(Envelope(f"sent-{number}", "/test", 1, event))
            await log.append([plan, Message(cell.proposals, value, headers)])
        await log.append([Message(cell.proposals, b"\xff no event", plan.headers)])
        await cell.until(lambda: len(cell.of(ProposalAnswered)) == 5)
    found = [(fact.proposal_id, fact.verdict, bool(fact.copy_of)) for fact in cell.of(ProposalAnswered)]
    name = proposed.proposal_id
    assert found == [
        (name, "accepted", False),
        (name, "accepted", True),
        ("late", "refused", False),
        (name, "accepted", True),
        ("ghosts", "refused", False),
    ]
    placements = [fact.job_id for fact in cell.of(PlacementDecided)]
    assert len(placements) == len(set(placements)) == 6
