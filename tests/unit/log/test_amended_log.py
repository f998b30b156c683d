"""The log with its ledger's amendments: what readers take, and how one waits for an amendment."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.ledger.record.amendment import propose
from penstock.ledger.record.record import Amended, Draft, Head, record_id, write
from penstock.ledger.replica.replica import Replica
from penstock.log.archive import Archive, Writer
from penstock.log.archived import ArchivedLog
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import TermStarted, TimerSet, TimerSubject
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_MS
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, signed_bytes, to_wire
from penstock.runtime.following.amended_log import AmendedLog, Repairs, Signer
from penstock.runtime.keys.node_keys import operators_code
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.forgeries import GATEWAYS
from tests.support.virtual_time import run_virtually

LEDGER, AMENDMENTS = Partition(Topic.LEDGER, 0), Partition(Topic.AMENDMENTS, 0)
SIGNER = Signer("default", GATEWAYS)


def poisoned() -> list[bytes]:
    """A term, and a timer behind the end of time."""
    about = TimerSubject(kind="ending", id="cell", attempt=0)
    first: Sequence[Event] = [TermStarted(term=1, placer_id="p1", settings=PlacerSettings())]
    late: Sequence[Event] = [TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=about)]
    head, one = write(Head(0, "0" * 32, 0), Draft(1, 1, {"placer_id": "p"}, "committed", None, first))
    return [one, write(head, Draft(1, 2, {"timer_id": "t"}, "committed", None, late))[1]]


def successors(values: Sequence[bytes], count: int) -> list[bytes]:
    """So many records without facts, behind these."""
    head, found = Head(len(values), record_id(values[-1]), 1), []
    for number in range(count):
        head, value = write(head, Draft(1, 3 + number, {"timer_id": "t"}, "committed", None, ()))
        found.append(value)
    return found


class Cell:
    """A poisoned ledger and its amendments."""

    def __init__(self, topics: Sequence[Topic] = (Topic.LEDGER, Topic.AMENDMENTS, Topic.JOBS)) -> None:
        self.broker = MemoryBroker()
        self.broker.create(dict.fromkeys(map(str, topics), 1))
        self.log = MemoryLog(self.broker)
        self.values = poisoned()
        self.broker.append("placer", [Message(LEDGER, value) for value in self.values])

    def amend(self, *, reason: str = "drill", helps: bool = True, signed: bool = True) -> None:
        found = propose(self.values[1], 1)
        facts = found.facts if helps else (AmendedFact(n=0, data="{}"),)
        event = LedgerAmended(
            offset=1, seq=2, sha256=found.sha256, facts=facts, by="ops", reason=reason, at_ms=1
        )
        envelope = Envelope(id=f"amend-{reason}", source="/penstock/gateway", time_ms=1, data=event)
        headers, value = to_wire(envelope)
        if signed:
            data = signed_bytes("default", envelope.id, envelope.type, value)
            headers = (*headers, operators_code(GATEWAYS, data))
        self.broker.append("gateway", [Message(AMENDMENTS, value, headers)])

    async def read(self, signer: Signer | None = None) -> bytes:
        """The poisoned record, as a reader gets it."""
        reader = AmendedLog(self.log, signer).reader({LEDGER: 0})
        try:
            _, record = await reader.read()
            return record.value
        finally:
            await reader.close()


def test_a_reader_gets_the_amended_record_and_its_fold_goes_on() -> None:
    """Its bytes are those that were written."""

    async def run() -> None:
        cell = Cell()
        assert not isinstance(await cell.read(), Amended)
        cell.amend()
        value = await cell.read()
        assert value == cell.values[1]
        replica = Replica()
        for offset, one in enumerate([cell.values[0], value]):
            assert replica.take(one, offset) is not None
        assert replica.state.timers["cell:ending"].at_ms == MAX_MS

    run_virtually(run())


def test_the_first_amendment_that_helps_counts() -> None:
    """Readers that began at different times agree."""

    async def run() -> None:
        cell = Cell()
        cell.amend(reason="in vain", helps=False)
        cell.amend(reason="first")
        before = await cell.read()
        cell.amend(reason="second")
        after = await cell.read()
        assert isinstance(before, Amended)
        assert isinstance(after, Amended)
        assert b'"first"' in before.text
        assert after.text == before.text

    run_virtually(run())


@pytest.mark.parametrize(("signer", "amended"), [(SIGNER, False), (None, True)])
def test_who_has_the_key_verifies_the_signature(
    signer: Signer | None, amended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The others trust the log's rights."""

    async def run() -> None:
        cell = Cell()
        cell.amend(signed=False)
        assert isinstance(await cell.read(signer), Amended) == amended
        assert ("is not signed by the gateway" in caplog.text) == (signer is not None)
        cell.amend(reason="signed")
        assert isinstance(await cell.read(SIGNER), Amended)

    run_virtually(run())


async def test_an_amendment_of_an_archived_record_is_taken(tmp_path: Path) -> None:
    """The record was amended, the cell went on, and its ledger's head was archived and deleted since. The
    archive has the bytes that were written, and readers the amendment."""
    cell = Cell()
    more = successors(cell.values, 3)
    cell.broker.append("placer", [Message(LEDGER, value) for value in more])
    cell.amend()
    archive = Archive(tmp_path / "archive")
    reader, writer = AmendedLog(cell.log).reader({LEDGER: 0}), Writer(archive, LEDGER)
    for record in (await reader.read())[:3]:
        writer.add(record)
    writer.commit()
    await reader.close()
    cell.broker.expire(LEDGER, 2)
    whole = ArchivedLog(cell.log, archive)
    assert (await whole.begin_offsets([LEDGER]))[LEDGER] == 0
    plain = whole.reader({LEDGER: 0})
    found: list[bytes] = []
    while len(found) < 5:
        found += [record.value for record in await plain.read()]
    assert found == [*cell.values, *more]
    replica, signed = Replica(), AmendedLog(whole, SIGNER).reader({LEDGER: 0})
    while replica.offset < 5:
        for record in await signed.read():
            assert replica.take(record.value, record.offset) is not None
    assert replica.state.timers["cell:ending"].at_ms == MAX_MS
    await plain.close()
    await signed.close()


def test_a_log_of_an_earlier_version_has_no_amendments() -> None:
    """Its topic is created with the next start of gateway, placer or projector."""

    async def run() -> None:
        assert await Cell([Topic.LEDGER]).read() == poisoned()[1]

    run_virtually(run())


def test_what_is_no_amendment_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Foreign bytes on the topic."""

    async def run() -> None:
        cell = Cell()
        cell.broker.append("x", [Message(AMENDMENTS, b"garbage")])
        cell.amend()
        assert isinstance(await cell.read(), Amended)

    run_virtually(run())
    assert "is not an amendment" in caplog.text


def test_a_reader_names_the_record_once_and_waits_for_each_amendment_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that does not help lets it try again, and then it waits for a further one: it never tries in
    vain."""

    async def run() -> None:
        cell, tries = Cell(), 0
        repairs, log = Repairs("projector", cell.log, 0), AmendedLog(cell.log)
        ready, done = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            nonlocal tries
            tries += 1
            replica, reader = Replica(), log.reader({LEDGER: 0})
            for record in await reader.read():
                replica.take(record.value, record.offset)
            done.set()

        async def service() -> None:
            while not done.is_set():
                await repairs.attempt(work, ready)

        serving = asyncio.create_task(service())
        await ready.wait()
        assert tries == 1
        cell.amend(reason="in vain", helps=False)
        await asyncio.sleep(1)  # clock: virtual time passes
        assert tries == 2
        await asyncio.sleep(3_600)  # clock: virtual time passes
        assert tries == 2
        cell.amend()
        await serving
        assert tries == 3

    run_virtually(run())
    named = [record.getMessage() for record in caplog.records if " stops: " in record.getMessage()]
    assert named == [
        "projector stops: the ledger's record at offset 1 (seq 2) cannot be decoded: penstock.timer.set.v1: "
        f"at_ms: Input should be less than or equal to {MAX_MS}. Nothing of this cell is read beyond it; "
        "all goes on by itself once that is mended: `penstock repair --at 1` amends it"
    ]
