"""Group commit, batching and log URLs, without any server."""

# clocks: what waits here runs in virtual time

import asyncio

import pytest

from penstock.errors import AppendFailed, ConfigurationError, NotAllowed, PenstockError
from penstock.log.batching import BURST_READS, TokenBucket
from penstock.log.group_commit import GroupCommit, PartlyFailed
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log
from penstock.log.port import MAX_BATCH_RECORDS, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.postgres.embedded_schema import pack_headers, unpack_headers
from tests.unit.virtually import virtually

JOBS, LEDGER = Partition("penstock.jobs.v1", 0), Partition("penstock.ledger.v1", 0)


class Disk:
    """A write that takes a moment, remembers its batches, and fails or refuses on request."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.written = 0
        self.fail_at: int | None = None

    async def write(self, batch: list[Message]) -> list[int]:
        self.batches.append([message.value for message in batch])
        await asyncio.sleep(0.005)
        if len(self.batches) - 1 == self.fail_at:
            raise AppendFailed("cable pulled")
        outcomes: list[int | PenstockError] = []
        for message in batch:
            if message.partition == LEDGER:
                outcomes.append(NotAllowed("no"))
            else:
                outcomes.append(self.written)
                self.written += 1
        if any(not isinstance(outcome, int) for outcome in outcomes):
            raise PartlyFailed(outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, int)]


@virtually
async def test_a_batch_gathers_while_the_last_one_is_written() -> None:
    """A hundred requests arrive during one fsync: the first goes alone, the others share the second."""
    disk = Disk()
    commit = GroupCommit(disk.write, name="test")
    answers = await asyncio.gather(*(commit.append([Message(JOBS, b"%d" % n)]) for n in range(100)))
    assert answers == [[n] for n in range(100)]
    assert len(disk.batches) <= 2
    await commit.close()


@virtually
async def test_large_calls_are_split_in_order() -> None:
    """A replayed backlog of 5,000 records: batches stay within the bound, the answer is one list."""
    disk = Disk()
    commit = GroupCommit(disk.write, name="test")
    messages = [Message(JOBS, b"%d" % n) for n in range(5000)]
    assert await commit.append(messages) == list(range(5000))
    assert [value for batch in disk.batches for value in batch] == [message.value for message in messages]
    assert max(map(len, disk.batches)) == MAX_BATCH_RECORDS
    await commit.close()


@virtually
async def test_a_failure_strikes_its_own_batch_only() -> None:
    """The second write fails: its callers get the error, later ones are served, a split call is not
    continued."""
    disk = Disk()
    disk.fail_at = 1
    commit = GroupCommit(disk.write, name="test")
    first = asyncio.create_task(commit.append([Message(JOBS, b"first")]))
    await asyncio.sleep(0.001)
    long = asyncio.create_task(
        commit.append([Message(JOBS, b"%d" % n) for n in range(MAX_BATCH_RECORDS + 5)])
    )
    last = asyncio.create_task(commit.append([Message(JOBS, b"last")]))
    assert await first == [0]
    with pytest.raises(AppendFailed, match="cable"):
        await long
    assert await last == [1]
    assert disk.batches[2] == [b"last"]
    await commit.close()


@virtually
async def test_a_forbidden_write_is_nobody_elses_failure() -> None:
    """Three callers share a batch, one of them may not write the ledger: only it is refused."""
    disk = Disk()
    commit = GroupCommit(disk.write, name="test")
    blocker = asyncio.create_task(commit.append([Message(JOBS, b"blocker")]))
    await asyncio.sleep(0.001)
    good, forged, mixed = await asyncio.gather(
        commit.append([Message(JOBS, b"good")]),
        commit.append([Message(LEDGER, b"forged")]),
        commit.append([Message(JOBS, b"half"), Message(LEDGER, b"forged")]),
        return_exceptions=True,
    )
    await blocker
    assert good == [1]
    assert isinstance(forged, NotAllowed)
    assert isinstance(mixed, AppendFailed)
    await commit.close()


@virtually
async def test_close_fails_every_call() -> None:
    """Shutdown during a write: nobody waits for ever, and no call succeeds without a write."""
    disk = Disk()
    commit = GroupCommit(disk.write, name="test")
    calls = [asyncio.create_task(commit.append([Message(JOBS, b"x")])) for _ in range(3)]
    await asyncio.sleep(0.001)
    await commit.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, AppendFailed) for outcome in outcomes)
    with pytest.raises(AppendFailed):
        await commit.append([Message(JOBS, b"late")])


def test_token_bucket_delays_a_stream_but_no_burst_after_idle() -> None:
    """One job's hops pass at once; a stream of 1,000 reads per second is gathered to one read per
    interval."""
    now_s = 0.0
    bucket = TokenBucket(4, lambda: now_s)
    for _ in range(BURST_READS):
        assert bucket.delay_s() == 0
        bucket.took()
    assert bucket.delay_s() == pytest.approx(0.004)
    reads, end_s = 0, 1.0
    while now_s < end_s:
        now_s += max(0.001, bucket.delay_s())
        bucket.took()
        reads += 1
    assert 240 <= reads <= 260
    now_s += 1.0
    assert bucket.delay_s() == 0
    assert TokenBucket(0, lambda: now_s).delay_s() == 0


def test_headers_round_trip() -> None:
    """Any header survives the embedded log's one column."""
    headers = (("a", b""), ("", b"x" * 70_000), ("größe", bytes(range(256))), ("a", b"again"))
    assert unpack_headers(pack_headers(headers)) == headers
    assert pack_headers(()) == b""
    assert unpack_headers(b"") == ()


async def test_open_log() -> None:
    """`PENSTOCK_LOG` decides; a wrong one is explained without telling the password."""
    assert isinstance(open_log("postgresql://u:p@127.0.0.1:5432/penstock", "placer"), EmbeddedLog)
    assert isinstance(open_log("kafka://one:9092,two:9092", "placer"), KafkaLog)
    assert isinstance(open_log("kafka://placer:s%40cret@one:9092", "placer"), KafkaLog)
    for wrong in (
        "kafka://one",
        "kafka://placer@one:9092",
        "kafka://u:s3cret@one:x",
        "redis://one:1",
        "nothing",
    ):
        with pytest.raises(ConfigurationError) as failure:
            open_log(wrong, "placer")
        assert "s3cret" not in str(failure.value)


def test_a_wait_too_short_for_the_clock_is_none() -> None:
    """A token that lacks 1e-16 would be waited for with a sleep that moves no clock: for ever, on virtual
    time."""
    now_s = 10.967226802741928
    bucket = TokenBucket(6, lambda: now_s)
    for _ in range(50):
        bucket.took()
        delay_s = bucket.delay_s()
        for _ in range(3):
            now_s += delay_s
            delay_s = bucket.delay_s()
        assert delay_s == 0.0
