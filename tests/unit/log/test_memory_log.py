"""The faults that tests can order from the in-memory log."""

import pytest

from penstock.errors import AppendFailed, NotAllowed, OffsetOutOfRange
from penstock.log.port import Message, Partition
from tests.support.log.memory_log import MemoryBroker, MemoryLog

LEDGER = Partition("penstock.ledger.v1", 0)


async def test_failed_append_may_or_may_not_have_happened() -> None:
    """The network breaks before or after the broker wrote: the writer sees the same error both times."""
    broker = MemoryBroker(clock=lambda: 7)
    log = await MemoryLog(broker, "placer").start()
    await log.create({LEDGER.topic: 1})
    broker.fail_next_append(after_write=False)
    broker.fail_next_append(after_write=True)
    for value in (b"lost", b"written"):
        with pytest.raises(AppendFailed):
            await log.append([Message(LEDGER, value)])
    assert await log.append([Message(LEDGER, b"next")]) == [1]
    assert [record.value for record in broker.records(LEDGER)] == [b"written", b"next"]
    assert {record.timestamp_ms for record in broker.records(LEDGER)} == {7}


async def test_records_are_lost() -> None:
    """Retention takes the oldest records; a restored backup lacks the newest, a recreated topic all of
    them."""
    broker = MemoryBroker()
    log = await MemoryLog(broker, "placer").start()
    await log.create({LEDGER.topic: 1})
    await log.append([Message(LEDGER, str(n).encode()) for n in range(6)])
    broker.expire(LEDGER, 2)
    broker.restore(LEDGER, 5)
    assert (await log.begin_offsets([LEDGER]), await log.end_offsets([LEDGER])) == ({LEDGER: 2}, {LEDGER: 5})
    for position in (1, 6):
        with pytest.raises(OffsetOutOfRange):
            await log.reader({LEDGER: position}).read()
    assert [record.value for record in await log.reader({LEDGER: 2}).read()] == [b"2", b"3", b"4"]
    broker.restore(LEDGER)
    assert (await log.begin_offsets([LEDGER]), await log.end_offsets([LEDGER])) == ({LEDGER: 0}, {LEDGER: 0})


async def test_write_rights() -> None:
    """Only the placer's identity may write the ledger; nothing of a refused call is written anywhere."""
    broker = MemoryBroker(allow={LEDGER.topic: {"placer"}})
    placer, gateway = MemoryLog(broker, "placer"), MemoryLog(broker, "gateway")
    jobs = Partition("penstock.jobs.v1", 0)
    await placer.create({LEDGER.topic: 1, jobs.topic: 1})
    with pytest.raises(NotAllowed):
        await gateway.append([Message(jobs, b"job"), Message(LEDGER, b"forged")])
    assert broker.records(jobs) == broker.records(LEDGER) == []
    await placer.append([Message(LEDGER, b"fact")])
    await gateway.append([Message(jobs, b"job")])
