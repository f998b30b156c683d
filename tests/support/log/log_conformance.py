"""What every `Log` adapter promises, one scenario each. Run on each adapter by subclassing `LogConformance`.

The subclass's module gives two fixtures: `log_factory`, an async callable `identity → started Log` whose logs
are closed at teardown, and `topic`, a topic name that no other test uses.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import pytest

from penstock.errors import LogError, OffsetOutOfRange, OffsetTaken, TooLarge
from penstock.log.port import MAX_RECORD_BYTES, Log, Message, Partition, Reader, Record
from tests.support.waiting import await_until

LogFactory = Callable[[str], Awaitable[Log]]
SILENCE_MS = 200  # for what must not happen
PROMPT_S = 4.0  # below the five seconds for which a Kafka broker may hold a fetch
BACKLOG_TURNS = 5
PACED_MS = 2_000
BUSY_ELSEWHERE_S = 0.3  # aiokafka fetches for other partitions when records lie unread for 0.1 s


def messages(partition: Partition, first: int, count: int = 1, *, label: str = "") -> list[Message]:
    """`count` messages whose values are `label` and a running number from `first`."""
    return [Message(partition, f"{label}{number}".encode()) for number in range(first, first + count)]


async def drain(reader: Reader, count: int) -> list[Record]:
    """Reads until there are `count` records, however many reads it takes."""
    records: list[Record] = []
    while len(records) < count:
        records += await reader.read()
    return records


def values(records: Sequence[Record]) -> list[bytes]:
    return [record.value for record in records]


def assert_ordered(records: Sequence[Record]) -> None:
    """Offsets rise strictly within each partition."""
    last: dict[Partition, int] = defaultdict(lambda: -1)
    for record in records:
        assert record.offset > last[record.partition], f"{record.partition}: {record.offset} after {last}"
        last[record.partition] = record.offset


class LogConformance:
    """One method per promise."""

    async def test_order_and_offsets(self, log_factory: LogFactory, topic: str) -> None:
        """Two cells write interleaved: each keeps its own order, and append returns where the records lie."""
        log = await log_factory("writer")
        await log.create({topic: 2})
        a, b = Partition(topic, 0), Partition(topic, 1)
        batch = [
            Message(a, b"a0"),
            Message(b, b"b0"),
            Message(a, b"a1"),
            Message(b, b"b1"),
            Message(a, b"a2"),
        ]
        offsets = await log.append(batch)
        assert offsets[0] < offsets[2] < offsets[4]
        assert offsets[1] < offsets[3]
        reader = log.reader({a: 0, b: 0})
        records = await drain(reader, 5)
        assert_ordered(records)
        assert values([record for record in records if record.partition == a]) == [b"a0", b"a1", b"a2"]
        assert values([record for record in records if record.partition == b]) == [b"b0", b"b1"]
        placed = {(record.partition, record.offset): record.value for record in records}
        for message, offset in zip(batch, offsets, strict=True):
            assert placed[message.partition, offset] == message.value
        await reader.close()

    async def test_everything_comes_back_as_written(self, log_factory: LogFactory, topic: str) -> None:
        """The envelope travels in headers: repeated names, binary values, empty and absent keys all
        survive."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        headers = (("ce_id", b"1"), ("ce_id", b"2"), ("trace", bytes(range(256))), ("größe", b""))
        batch = [
            Message(partition, b"{}", headers, b"cell-1"),
            Message(partition, b"", (), None),
            Message(partition, bytes(range(256)), (), b""),
        ]
        await log.append(batch)
        reader = log.reader({partition: 0})
        records = await drain(reader, 3)
        assert [(record.value, record.headers, record.key) for record in records] == [
            (message.value, message.headers, message.key) for message in batch
        ]
        assert all(record.timestamp_ms > 1_600_000_000_000 for record in records)
        fresh = (await log_factory("late")).reader({partition: 0})  # not through any shortcut of the writer
        assert await drain(fresh, 3) == records
        await reader.close()
        await fresh.close()

    async def test_concurrent_appends_keep_their_call_order(
        self, log_factory: LogFactory, topic: str
    ) -> None:
        """The gateway answers 300 requests at once: the log holds them in the order of the calls."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        answers = await asyncio.gather(*(log.append(messages(partition, n * 2, 2)) for n in range(300)))
        offsets = [offset for answer in answers for offset in answer]
        assert offsets == sorted(set(offsets))
        reader = log.reader({partition: 0})
        assert values(await drain(reader, 600)) == [str(n).encode() for n in range(600)]
        await reader.close()

    async def test_two_connections_see_each_other(self, log_factory: LogFactory, topic: str) -> None:
        """Placer and node-reporter are two programs: what one appends wakes the other, both ways, in one
        order."""
        one, two = await log_factory("placer"), await log_factory("node-reporter")
        await one.create({topic: 1})
        partition = Partition(topic, 0)
        readers = [one.reader({partition: 0}), two.reader({partition: 0})]
        for number in range(5):
            waiting = [asyncio.ensure_future(drain(reader, 2)) for reader in readers]
            await asyncio.gather(
                one.append(messages(partition, number, label="one ")),
                two.append(messages(partition, number, label="two ")),
            )
            seen = await asyncio.gather(*waiting)
            assert seen[0] == seen[1]
            assert set(values(seen[0])) == {f"one {number}".encode(), f"two {number}".encode()}
        for reader in readers:
            await reader.close()

    async def test_crossing_appends(self, log_factory: LogFactory, topic: str) -> None:
        """Two dispatchers write to the same partitions in opposite order, many times: nobody waits for
        ever."""
        one, two = await log_factory("one"), await log_factory("two")
        await one.create({topic: 64})
        partitions = [Partition(topic, index) for index in range(64)]
        there = [Message(partition, b"there") for partition in partitions]
        back = [Message(partition, b"back") for partition in reversed(partitions)]
        for _ in range(60):
            await asyncio.gather(one.append(there), two.append(back))
        ends = await one.end_offsets(partitions)
        assert set(ends.values()) == {120}

    async def test_reader_from_the_middle(self, log_factory: LogFactory, topic: str) -> None:
        """A service restarts from a snapshot: it reads on from its position, and from the end sees only
        news."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        offsets = await log.append(messages(partition, 0, 10))
        middle = log.reader({partition: offsets[6]})
        assert middle.position(partition) == offsets[6]
        assert values(await drain(middle, 4)) == [b"6", b"7", b"8", b"9"]
        assert middle.position(partition) > offsets[9]
        end = (await log.end_offsets([partition]))[partition]
        assert end == middle.position(partition)
        tail = log.reader({partition: end})
        assert await tail.read(timeout_ms=SILENCE_MS) == []  # clock: in which an old record would come
        await log.append(messages(partition, 10))
        assert values(await drain(tail, 1)) == [b"10"]
        await middle.close()
        await tail.close()

    async def test_max_records_bounds_a_read(self, log_factory: LogFactory, topic: str) -> None:
        """A service bounds its batch: the rest comes with the next reads, and the position is how far it has
        read."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        offsets = await log.append(messages(partition, 0, 10))
        reader = log.reader({partition: 0})
        seen: list[Record] = []
        while len(seen) < 10:
            part = await reader.read(max_records=3)
            assert len(part) <= 3
            seen += part
            assert reader.position(partition) == (
                offsets[len(seen)] if len(seen) < 10 else seen[-1].offset + 1
            )
        assert values(seen) == [str(n).encode() for n in range(10)]
        await reader.close()

    async def test_cancelled_read_loses_nothing(self, log_factory: LogFactory, topic: str) -> None:
        """A service waits for records *or* a timer and cancels the loser, hundreds of times, while records
        flow."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        reader = log.reader({partition: 0}, batch_ms=2)
        seen: list[Record] = []

        cancelled = turn = written = 0

        async def write() -> None:
            nonlocal written
            while written < 300 or cancelled <= 10:
                await log.append(messages(partition, written))
                written += 1
                await asyncio.sleep(0.001)  # clock: so that the reader gets its turn

        writing = asyncio.ensure_future(write())
        while len(seen) < written or not writing.done():
            turn += 1
            reading = asyncio.ensure_future(reader.read())
            await asyncio.sleep(
                0.0005 * (turn % 4)
            )  # clock: a moment of the cancellation, any of which is right
            if not reading.done():
                cancelled += 1
                reading.cancel()
            result = (await asyncio.gather(reading, return_exceptions=True))[0]
            if isinstance(result, list):
                seen += result
            else:
                assert isinstance(result, asyncio.CancelledError)
            if turn % 8 == 0:
                seen += await reader.read(timeout_ms=20)  # clock: so that some reads are not cancelled
        await writing
        assert values(seen) == [str(n).encode() for n in range(written)]
        await reader.close()

    async def test_time_outs(self, log_factory: LogFactory, topic: str) -> None:
        """A poll with time-out 0 does not wait on a quiet log, a longer one waits as long as asked at
        least."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        reader = log.reader({partition: 0})

        async def lasts_s(timeout_ms: int) -> float:
            start_s = asyncio.get_running_loop().time()  # clock: see where it is compared
            assert await reader.read(timeout_ms=timeout_ms) == []  # clock: the promise is about it
            return asyncio.get_running_loop().time() - start_s  # clock: see where it is compared

        async def prompt() -> bool:
            return await lasts_s(0) < SILENCE_MS / 2_000

        await lasts_s(SILENCE_MS)
        _: bool = await await_until(
            prompt, "a poll that does not wait; on a busy machine some take long all the same"
        )
        assert await lasts_s(SILENCE_MS) >= SILENCE_MS / 1000 * 0.9
        await log.append(messages(partition, 0))
        records: list[Record] = await await_until(
            lambda: reader.read(timeout_ms=0), "the record"
        )  # clock: as promised above
        assert values(records) == [b"0"]
        await reader.close()

    async def test_oversized_is_refused_before_anything_is_written(
        self, log_factory: LogFactory, topic: str
    ) -> None:
        """Somebody submits a job with a gigantic payload: its record and its neighbours stay out of the
        log."""
        log = await log_factory("writer")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        with pytest.raises(TooLarge):
            await log.append(
                [Message(partition, b"before"), Message(partition, b"x" * (MAX_RECORD_BYTES + 1))]
            )
        largest = b"x" * MAX_RECORD_BYTES
        await log.append([Message(partition, largest), Message(partition, b"after")])
        reader = log.reader({partition: 0})
        assert values(await drain(reader, 2)) == [largest, b"after"]
        await reader.close()

    async def test_large_batch(self, log_factory: LogFactory, topic: str) -> None:
        """A burst of 5,000 records in one call: split inside, whole and in order outside."""
        log, other = await log_factory("writer"), await log_factory("reader")
        await log.create({topic: 3})
        partitions = [Partition(topic, index) for index in range(3)]
        batch = [Message(partitions[n % 3], str(n).encode()) for n in range(5000)]
        offsets = await log.append(batch)
        assert len(offsets) == 5000
        reader = other.reader(dict.fromkeys(partitions, 0))
        records = await drain(reader, 5000)
        assert_ordered(records)
        for index, partition in enumerate(partitions):
            own = [record for record in records if record.partition == partition]
            assert values(own) == [str(n).encode() for n in range(index, 5000, 3)]
        await reader.close()

    async def test_end_offsets(self, log_factory: LogFactory, topic: str) -> None:
        """A restarting placer asks how far the ledger goes before it may decide."""
        log = await log_factory("writer")
        await log.create({topic: 2})
        a, b = Partition(topic, 0), Partition(topic, 1)
        assert await log.end_offsets([a, b]) == {a: 0, b: 0}
        offsets = await log.append(messages(a, 0, 3))
        ends = await log.end_offsets([a, b])
        assert ends[a] > offsets[-1]
        assert ends[b] == 0
        await log.create({topic: 2})  # again: nothing changes
        await log.create({topic: 1})  # never shrinks
        assert await log.end_offsets([a, b]) == ends
        assert await log.begin_offsets([a, b]) == {a: offsets[0], b: 0}

    async def test_deleted_records_are_gone_for_everybody(self, log_factory: LogFactory, topic: str) -> None:
        """The ledger's head was archived: the rest keeps its offsets, and a reader that needs the head is
        refused."""
        log, other = await log_factory("operator"), await log_factory("placer")
        await log.create({topic: 2})
        a, b = Partition(topic, 0), Partition(topic, 1)
        await log.append([*messages(a, 0, 10), *messages(b, 0, 3)])
        await log.delete_before({a: 6, b: 0})
        await log.delete_before({a: 4})  # again: nothing changes
        assert await other.begin_offsets([a, b]) == {a: 6, b: 0}
        assert await log.end_offsets([a, b]) == {a: 10, b: 3}
        assert await log.append(messages(a, 10)) == [10]
        reader = other.reader({a: 6})
        found: list[Record] = []
        while len(found) < 5:
            found += await reader.read()
        assert [record.offset for record in found] == [6, 7, 8, 9, 10]
        await reader.close()
        late = other.reader({a: 5})
        with pytest.raises(OffsetOutOfRange):
            await late.read()
        await late.close()
        await log.delete_before({a: 11})
        assert await other.begin_offsets([a]) == {a: 11}

    async def test_a_record_that_must_get_an_offset(self, log_factory: LogFactory, topic: str) -> None:
        """A placer that was replaced writes a record and its orders in one commit: none of both may be
        seen."""
        log, other = await log_factory("placer"), await log_factory("successor")
        ledger, orders = Partition(topic, 0), Partition(topic + ".orders", 0)
        await log.create({topic: 1, topic + ".orders": 1})
        if not log.conditional:
            with pytest.raises(LogError):
                await log.append([Message(ledger, b"first", at=0)])
            assert (await log.end_offsets([ledger]))[ledger] == 0
            return
        both = [Message(ledger, b"a", at=0), Message(orders, b"order a"), Message(ledger, b"b", at=1)]
        assert await log.append(both) == [0, 0, 1]
        crossing = [log.append([Message(ledger, b"c", at=2)]), log.append([Message(ledger, b"d", at=3)])]
        assert list(await asyncio.gather(*crossing)) == [[2], [3]]
        await other.append([Message(ledger, b"successor")])
        for at in (4, 6):
            with pytest.raises(OffsetTaken):
                await log.append([Message(ledger, b"late", at=at), Message(orders, b"late order")])
        assert await log.end_offsets([ledger, orders]) == {ledger: 5, orders: 1}
        assert await log.append([Message(ledger, b"e", at=5)]) == [5]

    async def test_position_outside_the_log(self, log_factory: LogFactory, topic: str) -> None:
        """A snapshot from another installation is loaded: its position is not in this log, and silence would
        lie."""
        log = await log_factory("reader")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        await log.append(messages(partition, 0, 3))
        reader = log.reader({partition: 1000})
        with pytest.raises(OffsetOutOfRange):
            await reader.read()
        await reader.close()

    async def test_unknown_partition(self, log_factory: LogFactory, topic: str) -> None:
        """A topic was never created: writer and reader get an error, instead of waiting for ever."""
        log = await log_factory("writer")
        nowhere = Partition(topic + ".missing", 0)
        with pytest.raises(LogError):
            await log.append(messages(nowhere, 0))
        reader = log.reader({nowhere: 0})
        with pytest.raises(LogError):
            await reader.read()
        await reader.close()

    async def test_slow_reader_next_to_a_fast_one(self, log_factory: LogFactory, topic: str) -> None:
        """The projector is stuck in a long transaction: the placer still reads at once, nobody loses a
        record."""
        log = await log_factory("both")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        fast, slow = log.reader({partition: 0}), log.reader({partition: 0})
        assert await slow.read(timeout_ms=0) == []  # clock: so that it begins here
        for first in range(0, 30_000, 1000):
            await log.append(messages(partition, first, 1000))
            assert values(await drain(fast, 1000))[0] == str(first).encode()
        assert values(await drain(slow, 30_000)) == [str(n).encode() for n in range(30_000)]
        await fast.close()
        await slow.close()

    async def test_idle_partitions_hold_up_no_busy_one(self, log_factory: LogFactory, topic: str) -> None:
        """A backlog on two partitions, none on the third; its reader stops to decide, and then all that came
        is there."""
        log = await log_factory("one")
        await log.create({topic: 3})
        busy, other = Partition(topic, 0), Partition(topic, 1)
        reader = log.reader({busy: 0, other: 0, Partition(topic, 2): 0})

        async def turn_s() -> float:
            start_s = asyncio.get_running_loop().time()  # clock: see what is waited for
            await log.append([*messages(busy, 0, 300), *messages(other, 0, 300)])
            left = 600 - len(await reader.read(max_records=100))
            await asyncio.sleep(BUSY_ELSEWHERE_S)  # clock: longer than aiokafka lets records lie unread
            while left:
                left -= len(await reader.read(max_records=100))
            return asyncio.get_running_loop().time() - start_s  # clock: see what is waited for

        async def prompt() -> bool:
            return max([await turn_s() for _ in range(BACKLOG_TURNS)]) < PROMPT_S

        _: bool = await await_until(
            prompt, "turns without a fetch that is held; on a busy machine not the first ones"
        )
        await reader.close()

    async def test_batching_delays_no_first_record(self, log_factory: LogFactory, topic: str) -> None:
        """On a quiet system a lone record passes a paced reader as fast as any other."""
        log = await log_factory("both")
        await log.create({topic: 1})
        partition = Partition(topic, 0)

        async def prompt() -> bool:
            [offset] = await log.append(messages(partition, 0))
            reader = log.reader({partition: offset}, batch_ms=PACED_MS)
            start_s = asyncio.get_running_loop().time()  # clock: see what is waited for
            assert values(await drain(reader, 1)) == [b"0"]
            lasted_s = asyncio.get_running_loop().time() - start_s  # clock: see what is waited for
            await reader.close()
            return lasted_s < PACED_MS / 1_500

        _: bool = await await_until(
            prompt, "a record that is not delayed; on a busy machine not the first one"
        )

    async def test_close_is_idempotent(self, log_factory: LogFactory, topic: str) -> None:
        """Shutdown paths overlap: closing twice is fine, and a closed log takes no more records."""
        log = await log_factory("closing")
        await log.create({topic: 1})
        partition = Partition(topic, 0)
        await log.append(messages(partition, 0))
        reader = log.reader({partition: 0})
        await drain(reader, 1)
        await reader.close()
        await reader.close()
        await log.close()
        await log.close()
        with pytest.raises(LogError):
            await log.append(messages(partition, 1))
