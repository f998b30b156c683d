"""A ledger record that no reader can decode: each names it once and waits, an operator amends it, and all go
on."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from infra.devservers.kafka import KafkaBroker
from penstock.cli.app import run as penstock
from penstock.ledger.record.record import Draft, write
from penstock.ledger.replica.replica import Replica
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import JobEnded, TimerSet, TimerSubject
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined
from penstock.model.nouns.types import MAX_MS
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.following.snapshots import load_latest_from
from penstock.runtime.settings import Settings
from penstock_services.batcher.shell import service as batcher
from penstock_services.contention_guard.shell import service as contention_guard
from penstock_services.estimator.shell import service as estimator
from penstock_services.gateway.shell import service as gateway
from penstock_services.gateway.shell.options import Options
from penstock_services.migrator.shell import service as migrator
from penstock_services.placer.core import step
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.shell import service as placer
from penstock_services.placer.shell.replay import Replayer
from penstock_services.placer.shell.term import ledger_headers
from penstock_services.projector.shell import service as projector
from penstock_services.projector.shell.rebuild import verify
from tests.support.cluster.driver import job_spec, node_spec
from tests.support.installation.services import beside
from tests.support.node_reporter.forgeries import GATEWAYS
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

DAY_S = 86_400.0
READERS = (
    "placer",
    "projector",
    "estimator",
    "batcher",
    "migrator",
    "contention-guard",
    "the gateway's replica",
)
SOURCE = "/penstock/gateway"


class Cells:
    """Two cells on one log, whose services run in this process."""

    def __init__(self, dsn: str, log: Log, log_url: str = "") -> None:
        self.log = log
        self.settings = [
            Settings(log_url=log_url or dsn, dsn=dsn, cell=name, cell_index=index)
            for index, name in enumerate(("default", "other"))
        ]

    async def send(self, cell: int, event_id: str, event: Event) -> None:
        headers, value = to_wire(Envelope(id=event_id, source=SOURCE, time_ms=1, data=event))
        await self.log.append([Message(Partition(event.TOPIC or "", cell), value, headers)])

    async def ledger(self, cell: int = 0) -> list[bytes]:
        """The records as they were written."""
        place = Partition(Topic.LEDGER, cell)
        end = (await self.log.end_offsets([place]))[place]
        reader, found = self.log.reader({place: 0}), []
        while len(found) < end:
            found += [record.value for record in await reader.read()]
        await reader.close()
        return found

    async def until(self, text: bytes, cell: int = 0) -> int:
        """The offset of the first ledger record with this text."""

        async def offset() -> int | None:
            return next((n for n, value in enumerate(await self.ledger(cell)) if text in value), -1) + 1

        return await await_until(offset, lambda: f"{text!r} in the ledger of cell {cell}") - 1

    @asynccontextmanager
    async def serving(self, cell: int, *services: Any) -> AsyncIterator[None]:
        """These services' `run` on one cell, ready."""
        async with AsyncExitStack() as stack:
            for run in services:
                stop, ready = asyncio.Event(), asyncio.Event()
                more = (
                    {"start": placer.start_of_process("p", GATEWAYS, standing_by=False)}
                    if run is placer.run
                    else {}
                )
                await stack.enter_async_context(
                    beside(run(self.settings[cell], stop, log=self.log, ready=ready, **more), stop, ready)
                )
            yield

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the first cell's gateway."""
        options = Options(host="127.0.0.1", port=0, operator_key=GATEWAYS, answer_within_s=DAY_S)
        listener = gateway.listening_socket(options)
        stop, ready = asyncio.Event(), asyncio.Event()
        serving = gateway.serve(self.settings[0], options, stop, log=self.log, ready=ready, listener=listener)
        async with (
            beside(serving, stop, ready),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=None) as http,
        ):
            yield http


@pytest_asyncio.fixture
async def cells(dsn: str) -> AsyncIterator[Cells]:
    log = await EmbeddedLog(dsn, "test").start()
    await log.create(topic_partitions(2))
    yield Cells(dsn, log)
    await log.close()


async def poisoned(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> int:
    """A placer of an earlier version, which proves nothing, computes a time beyond all times and an exit code
    beyond all codes.

    Returns the offset of the record, which has a successor.
    """
    decide = Decider.decide

    def earlier(self: Any, state: Any, event: Event, *rest: Any) -> Iterator[Event]:
        yield from decide(self, state, event, *rest)
        if isinstance(event, JobSubmitted) and event.job_id == "poison":
            about = TimerSubject(kind="ending", id="cell", attempt=0)
            yield TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=about)
            yield JobEnded(job_id="poison", outcome="cancelled", exit_code=300, reason="worn out")

    with monkeypatch.context() as patched:
        patched.setattr(step, "prove_readable", lambda _: None)
        patched.setattr(Decider, "decide", earlier)
        async with cells.serving(0, placer.run):
            await cells.send(0, "node", NodeJoined(node=node_spec("n1")))
            await cells.send(0, "submit-first", JobSubmitted(job_id="first", spec=job_spec()))
            await cells.until(b'"submit-first"')
            async with cells.serving(0, projector.run):
                await tables(cells, 0, "first")
            await cells.send(0, "submit-poison", JobSubmitted(job_id="poison", spec=job_spec()))
            await cells.send(0, "submit-after", JobSubmitted(job_id="after", spec=job_spec()))
            offset = await cells.until(b'"submit-poison"')
            await cells.until(b'"submit-after"')
    return offset


async def tables(cells: Cells, cell: int, job_id: str) -> str:
    """The job's status in the tables, once they have it."""
    schema = "penstock" if cell == 0 else "penstock_other"

    async def status() -> str | None:
        import asyncpg

        connection = await asyncpg.connect(cells.settings[cell].need_dsn("the test"))
        try:
            found: str | None = await connection.fetchval(
                f"SELECT status FROM {schema}.jobs WHERE job_id = $1", job_id
            )
            return found
        except asyncpg.UndefinedTableError:
            return None
        finally:
            await connection.close()

    return str(await await_until(status, f"{job_id} in the tables of {schema}"))


def counted_readers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the cell's index with each reader of a ledger that begins: a service that tries again begins a
    new one."""
    begun: list[int] = []
    amendments = AmendedLog.amendments

    async def counting(self: AmendedLog, cell_index: int) -> Any:
        begun.append(cell_index)
        return await amendments(self, cell_index)

    monkeypatch.setattr(AmendedLog, "amendments", counting)
    return begun


def stops(caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """Reader → its messages that name the record."""
    found: dict[str, list[str]] = {}
    for record in caplog.records:
        text = record.getMessage()
        if " stops: " in text:
            found.setdefault(text.partition(" stops: ")[0], []).append(text)
    return found


async def command(http: httpx.AsyncClient, *words: str) -> int:
    """The exit code of one command line, given in a thread: the gateway answers on this loop."""
    return await asyncio.to_thread(penstock, ["--server", str(http.base_url), *words])


async def placed(http: httpx.AsyncClient, job_id: str) -> None:
    async def row() -> bool:
        answer = await http.get(f"/v1/jobs/{job_id}")
        return answer.status_code == 200 and answer.json()["placed_ms"] is not None

    await await_until(row, f"the placement of {job_id}")


WHY = "a worn-out job"
"""The operator's reason."""


def named_once(caplog: pytest.LogCaptureFixture, offset: int) -> None:
    """Each reader has named offset, fact and remedy, and none of them tries again and again."""
    assert sorted(stops(caplog)) == sorted(READERS)
    for reader, messages in stops(caplog).items():
        [text] = messages  # none of them tries again and again
        assert f"offset {offset} " in text, reader
        assert f"`penstock repair --at {offset}`" in text, reader
        assert "penstock.timer.set.v1: at_ms" in text, reader


async def tables_answer(http: httpx.AsyncClient, offset: int) -> None:
    """What the tables hold is shown; answers from the replica name the record and the remedy."""
    assert [job["job_id"] for job in (await http.get("/v1/jobs")).json()["jobs"]] == ["first"]
    assert (await http.get("/v1/jobs/first")).json()["job_id"] == "first"
    for path in ("/v1/jobs/first/why", "/v1/jobs/first/eta", "/v1/queue"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["type"]) == (
            409,
            "urn:penstock:problem:ledger_undecodable",
        )
        assert f"penstock repair --at {offset}" in answer.json()["detail"]
    assert (await http.get("/v1/status")).json()["undecodable"]["offset"] == offset


async def operator_repairs(
    http: httpx.AsyncClient, offset: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Wrong requests are refused, a look writes nothing, and the repair is applied; returns its answer."""
    assert (await http.get(f"/v1/repair/{offset - 1}")).json()["type"].endswith("not_amendable")
    assert (await http.get("/v1/repair/99999")).status_code == 404
    wrong = await http.post(f"/v1/repair/{offset}", json={"sha256": "0" * 64})
    assert (wrong.status_code, wrong.json()["type"]) == (409, "urn:penstock:problem:other_record")
    capsys.readouterr()
    assert await command(http, "repair", "--at", str(offset), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert f"timer.set.v1 at_ms: {MAX_MS + 1} becomes {MAX_MS}" in shown
    assert "job.ended.v1 exit_code: 300 becomes 255" in shown
    assert "nothing was written" in shown

    assert await command(http, "repair", "--at", str(offset), "--yes", "--reason", WHY, "-o", "json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["applied"], done["reason"], len(done["changes"])) == (True, WHY, 2)
    found: dict[str, Any] = done
    return found


async def all_go_on(cells: Cells, http: httpx.AsyncClient, offset: int, done: dict[str, Any]) -> None:
    """A new job is placed, all answers come again, and the amendment stands in the stream of events."""
    await cells.send(0, "submit-new", JobSubmitted(job_id="new", spec=job_spec()))
    await placed(http, "new")
    assert (await http.get("/v1/jobs/first/why")).status_code == 200
    assert (await http.get("/v1/status")).json()["undecodable"] is None
    again = await http.get(f"/v1/repair/{offset}")
    assert (again.status_code, again.json()["type"]) == (409, "urn:penstock:problem:already_amended")
    [event] = [
        event
        for event in (await http.get("/v1/jobs/poison/events")).json()["events"]
        if event["type"] == "penstock.record.amended"
    ]
    assert (event["data"]["reason"], event["data"]["by"]) == (WHY, done["by"])
    poison = (await http.get("/v1/jobs/poison")).json()
    assert (poison["status"], poison["exit_code"]) == ("cancelled", 255)


async def test_the_drill(
    cells: Cells,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Readers start on a poisoned ledger, the other cell works on, tables are read; then the operator looks,
    and repairs."""
    caplog.set_level(logging.WARNING)
    offset = await poisoned(cells, monkeypatch)
    before, begun = await cells.ledger(), counted_readers(monkeypatch)
    services = (placer, projector, estimator, batcher, migrator, contention_guard)
    async with cells.serving(0, *(service.run for service in services)), cells.gateway() as http:
        await await_until(
            lambda: len(stops(caplog)) == len(READERS), lambda: f"all readers stop: {stops(caplog)}"
        )

        tries = begun.count(0)
        async with cells.serving(1, placer.run, projector.run, estimator.run):
            await cells.send(1, "node", NodeJoined(node=node_spec("m1")))
            await cells.send(1, "submit-elsewhere", JobSubmitted(job_id="elsewhere", spec=job_spec()))
            await cells.until(b"penstock.placement.decided.v1", cell=1)

        named_once(caplog, offset)
        assert begun.count(0) == tries, "all of them wait"
        assert not [r for r in caplog.records if "starts again after" in r.getMessage()]
        assert await cells.ledger() == before, "a placer that cannot read decides nothing"

        await tables_answer(http, offset)
        done = await operator_repairs(http, offset, capsys)
        await all_go_on(cells, http, offset, done)
        await every_reader_agrees(cells)
    assert all(len(messages) == 1 for messages in stops(caplog).values())
    assert (await cells.ledger())[: len(before)] == before, "the ledger is only appended to"


async def every_reader_agrees(cells: Cells) -> None:
    settings, amended = cells.settings[0], AmendedLog(cells.log)
    found = await verify(settings, amended)
    assert found["ok"], found["differences"]
    report = await Replayer(amended, 0).run()
    assert (report.different, report.amended, report.void) == (0, 1, 0), report.differences
    assert report.records == len(await cells.ledger())
    replica = await load_latest_from(
        settings.need_dsn("the test"), "default", amended, Partition(Topic.LEDGER, 0)
    )
    assert replica.head.seq <= report.head_seq


async def test_an_amendment_that_no_operator_signed_changes_nothing(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody with access to the log leaves the decision out. Placer and gateway verify the signature, and
    stay where they are."""
    caplog.set_level(logging.WARNING)
    offset = await poisoned(cells, monkeypatch)
    async with cells.serving(0, placer.run), cells.gateway() as http:
        proposal = (await http.get(f"/v1/repair/{offset}")).json()
        forged = LedgerAmended(
            offset=offset,
            seq=proposal["seq"],
            sha256=proposal["sha256"],
            facts=tuple(AmendedFact(n=change["n"]) for change in proposal["changes"]),
            by="nobody",
            reason="",
            at_ms=1,
        )
        before = await cells.ledger()
        await cells.send(0, "forged", forged)

        def refused() -> bool:
            texts = [record.getMessage() for record in caplog.records]
            return sum("is not signed by the gateway" in text for text in texts) >= 2

        await await_until(refused, "both readers have seen the forgery")
        assert (await http.get("/v1/status")).json()["undecodable"]["offset"] == offset
        assert await cells.ledger() == before
        done = await http.post(f"/v1/repair/{offset}", json={"sha256": proposal["sha256"]})
        assert done.json()["applied"]
        await cells.send(0, "submit-new", JobSubmitted(job_id="new", spec=job_spec()))
        await cells.until(b'"submit-new"')


async def unfoldable(cells: Cells) -> int:
    """A placer of tomorrow has ended a job twice in one record, and went on. Returns the record's offset."""
    async with cells.serving(0, placer.run, projector.run):
        await cells.send(0, "node", NodeJoined(node=node_spec("n1")))
        await cells.send(0, "submit-first", JobSubmitted(job_id="first", spec=job_spec()))
        await tables(cells, 0, "first")
    reader, values = Replica(), await cells.ledger()
    for offset, value in enumerate(values):
        reader.take(value, offset)
    about, head = TimerSubject(kind="ending", id="cell", attempt=0), reader.head
    ended = JobEnded(job_id="first", outcome="cancelled", reason="tomorrow")
    for facts in ((ended, ended), (TimerSet(timer_id="cell:ending", at_ms=MAX_MS, about=about),)):
        cause: dict[str, object] = {"timer_id": "cell:tomorrow"}
        draft = Draft(head.term, reader.state.now_ms, cause, "committed", None, facts)
        head, value = write(head, draft)
        await cells.log.append(
            [Message(Partition(Topic.LEDGER, 0), value, ledger_headers("default", head.seq))]
        )
    return len(values)


async def test_a_record_that_cannot_be_folded_is_repaired_in_the_same_way(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything in it can be decoded, and it contradicts the state. Readers name it once and wait."""
    caplog.set_level(logging.WARNING)
    offset = await unfoldable(cells)
    begun = counted_readers(monkeypatch)
    services = (placer, projector, estimator, batcher, migrator, contention_guard)
    async with cells.serving(0, *(service.run for service in services)), cells.gateway() as http:
        await await_until(lambda: len(stops(caplog)) == len(READERS), lambda: f"they stop: {stops(caplog)}")
        tries = begun.count(0)
        for reader, messages in stops(caplog).items():
            [text] = messages
            assert f"offset {offset} " in text, reader
            assert "cannot be folded: penstock.job.ended.v1: " in text, reader
            assert f"`penstock repair --at {offset}`" in text, reader
        status = (await http.get("/v1/status")).json()["undecodable"]
        assert (status["offset"], status["type"]) == (offset, "penstock.job.ended.v1")
        proposal = (await http.get(f"/v1/repair/{offset}")).json()
        assert [(change["n"], change["becomes"]) for change in proposal["changes"]] == [(1, None)]
        assert begun.count(0) - tries <= 2, "all of them wait: only the gateway has looked at the record"
        done = await http.post(f"/v1/repair/{offset}", json={"sha256": proposal["sha256"], "reason": WHY})
        assert done.json()["applied"], done.text
        await cells.send(0, "submit-new", JobSubmitted(job_id="new", spec=job_spec()))
        await placed(http, "new")
        assert (await http.get("/v1/jobs/first")).json()["status"] == "cancelled"
        assert (await http.get("/v1/status")).json()["undecodable"] is None
        assert not [r for r in caplog.records if "starts again after" in r.getMessage()]
        found = await verify(cells.settings[0], AmendedLog(cells.log))
        assert found["ok"], found["differences"]


@pytest.mark.kafka
@pytest.mark.usefixtures("patient_kafka")
async def test_on_kafka_too(
    dsn: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same on a real Kafka, with the services that decide and show."""
    caplog.set_level(logging.WARNING)
    url = f"kafka://{kafka.bootstrap}"
    log = await open_log(url, "test").start()
    try:
        await log.create(topic_partitions(2))
        cells = Cells(dsn, log, url)
        offset = await poisoned(cells, monkeypatch)
        async with (
            cells.serving(0, placer.run, projector.run, estimator.run, batcher.run),
            cells.gateway() as http,
        ):
            await await_until(lambda: len(stops(caplog)) == 5, lambda: f"five readers stop: {stops(caplog)}")
            proposal = (await http.get(f"/v1/repair/{offset}")).json()
            done = await http.post(f"/v1/repair/{offset}", json={"sha256": proposal["sha256"]})
            assert done.json()["applied"]
            await cells.send(0, "submit-new", JobSubmitted(job_id="new", spec=job_spec()))
            await placed(http, "new")
            await every_reader_agrees(cells)
    finally:
        await log.close()
