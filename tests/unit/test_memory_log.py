"""The faults that tests can order from the in-memory log."""

import pytest

from penstock.errors import AppendFailed, NotAllowed
from penstock.log.port import Message, Partition
from tests.support.memory_log import MemoryBroker, MemoryLog

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
