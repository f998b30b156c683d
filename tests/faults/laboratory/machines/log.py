"""The log of a run: append-only partitions; late, overtaking and failing as the `Log` port allows it.

What one producer appends to one partition lands in its order. Everything else may overtake: topics each
other, producers each other, readers each other. An append whose producer was killed before it was
acknowledged has landed whole, in part, or not at all, and may still land later; one that fails may have
happened all the same.

A conditional log, as the embedded one, has compare-and-append and commits each append as one transaction over
all its partitions: whole or not at all. Its acknowledgement may be lost, and a commit may come after its
failure is known.
"""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from penstock.errors import AppendFailed, LogError, OffsetOutOfRange, OffsetTaken
from penstock.log.group_commit import check_sizes
from penstock.log.port import MAX_READ_RECORDS, Message, Partition, Reader, Record
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from tests.faults.laboratory.machines.process import Process
from tests.faults.laboratory.world import World
from tests.support.virtual_time import EPOCH_MS

LATE_S = 5.0  # at most, between the failure of an append and its landing all the same
LANE_GAP_S = (
    1e-6  # between two landings of one producer in one partition: timers of the same time are in no order
)
FEW_RECORDS = 8
KINDS: dict[str, str] = {
    Topic.LEDGER: "ledger",
    Topic.ORDERS: "orders",
    **dict.fromkeys(INPUT_TOPICS, "inputs"),
}
COMMIT_ORDER: dict[str, int] = {Topic.DEAD_LETTERS: 0, Topic.LEDGER: 1}
"""A transaction's records are there at one instant; an observer is shown causes first, others last."""


class Broker:
    """All partitions. `landed(record)` sees every record as it lands."""

    def __init__(self, world: World, landed: Callable[[Record], None], *, conditional: bool = False) -> None:
        self.world = world
        self.landed = landed
        self.conditional = conditional
        """As the embedded log; else as Kafka."""
        self.refused = 0
        """Commits that came too late for the offset that they asked for."""
        self.unreachable_until_s = 0.0
        self._records: dict[Partition, list[Record]] = {}
        self._first: dict[Partition, int] = {}
        self.ended: dict[Partition, int] = {}
        """Where a partition ended that was lost since: up to there readers may hold records of it."""
        self._waiting: dict[Partition, dict[asyncio.Future[None], None]] = {}

    def records(self, partition: Partition) -> list[Record]:
        return self._records.setdefault(partition, [])

    def end(self, partition: Partition) -> int:
        return len(self.records(partition))

    def first(self, partition: Partition) -> int:
        """The oldest offset that retention has left."""
        return self._first.get(partition, 0)

    def expire(self, partition: Partition) -> None:
        """Retention removes all that is there."""
        self._first[partition] = self.end(partition)
        self._wake(partition)

    def restore(self, partition: Partition, end: int = 0) -> None:
        """It is as it was when it ended at `end`; at 0: as if deleted and created again."""
        self.ended[partition] = max(self.end(partition), self.ended.get(partition, 0))
        del self.records(partition)[end:]
        self._first[partition] = min(end, self.first(partition))
        self._wake(partition)

    def put(self, messages: Iterable[Message]) -> list[int]:
        """They land, now. Returns their offsets."""
        offsets = []
        now_ms = EPOCH_MS + int(self.world.now_s * 1_000)  # by the log's own clock
        for message in messages:
            records = self.records(message.partition)
            record = Record(
                message.partition, len(records), message.value, tuple(message.headers), message.key, now_ms
            )
            records.append(record)
            offsets.append(record.offset)
            self.world.guarded(lambda record=record: self.landed(record))  # type: ignore[misc]
            self._wake(message.partition)
        return offsets

    def commit(self, messages: Sequence[Message]) -> list[int]:
        """One transaction, now. Raises `OffsetTaken`, and nothing lands, unless each `at` is the offset that
        it gets."""
        ends: dict[Partition, int] = {}
        for message in messages:
            end = ends.get(message.partition, self.end(message.partition))
            if message.at not in (None, end):
                self.refused += 1
                raise OffsetTaken(f"{message.partition} ends at {end}, not at {message.at}")
            ends[message.partition] = end + 1
        order = sorted(
            range(len(messages)), key=lambda index: COMMIT_ORDER.get(messages[index].partition.topic, 2)
        )
        offsets = self.put(messages[index] for index in order)
        return [offset for _, offset in sorted(zip(order, offsets, strict=True))]

    def _wake(self, partition: Partition) -> None:
        for waiter in self._waiting.pop(partition, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, partitions: Iterable[Partition], timeout_s: float | None) -> None:
        """Waits for the next record in one of these partitions, at most so long."""
        waiter: asyncio.Future[None] = self.world.loop.create_future()
        timer = None if timeout_s is None else self.world.loop.call_later(timeout_s, _done, waiter)
        for partition in partitions:
            self._waiting.setdefault(partition, {})[waiter] = None
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            for partition in partitions:
                self._waiting.get(partition, {}).pop(waiter, None)


def _done(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Piece:
    """What one append writes into one partition, or into all in one transaction."""

    def __init__(self, messages: list[Message], cut: int) -> None:
        self.messages = messages
        self.cut = cut
        """So many of them land if the producer is killed before."""
        self.offsets: list[int] = []
        self.error: OffsetTaken | None = None


class Connection:
    """One connection to the broker; `process`: of whom. Adapter of `penstock.log.port.Log`."""

    def __init__(self, broker: Broker, process: Process | None = None) -> None:
        self.conditional = broker.conditional
        self._broker = broker
        self._process = process
        self._world = broker.world
        self._lanes: dict[Partition | None, float] = {}
        """Partition (None: the transactions of a conditional log) → when this producer's latest append to it
        lands, s."""
        self._under_way: dict[_Piece, None] = {}
        if process is not None:
            process.at_death.append(self._cut_off)

    async def start(self) -> Self:
        return self

    async def close(self) -> None:
        pass

    async def create(self, topics: Mapping[str, int]) -> None:
        for topic, count in topics.items():
            for index in range(count):
                self._broker.records(Partition(topic, index))

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        await self.gate("ends")
        return {partition: self._broker.end(partition) for partition in partitions}

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        await self.gate("ends")
        return {partition: self._broker.first(partition) for partition in partitions}

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        raise LogError("no run of the laboratory archives")

    async def gate(self, what: str) -> None:
        """Where its process may be killed or asleep; while the broker is away, everybody waits here."""
        if self._process is not None:
            await self._process.gate(what)
            while not self._world.calm and self._broker.unreachable_until_s > self._world.now_s:
                await asyncio.sleep(self._broker.unreachable_until_s - self._world.now_s)
            self._process.step(what)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        check_sizes(messages)
        if not messages:
            return []
        if not self.conditional and any(message.at is not None for message in messages):
            raise LogError("this log cannot write a record at a given offset only")
        kind = f"append {KINDS.get(messages[0].partition.topic, 'others')}"
        await self.gate(kind)
        world, failing = self._world, 4
        if self._process is not None and world.happens(world.rates.append):
            failing = int(world.rng.integers(0, 4))
        offsets: list[int] = []
        if failing == 3:
            piece = _Piece(list(messages), 0)
            world.at(world.within(0, LATE_S), lambda: self._land(piece))
        elif failing:
            some = len(messages)
            if failing == 2:
                some = int(world.rng.integers(0, some + 1))
            offsets = await self._write(messages if self.conditional else messages[:some])
        await self.gate(f"after {kind}")
        if failing < 4:
            raise AppendFailed(f"fault {failing}")
        return offsets

    async def _write(self, messages: Sequence[Message]) -> list[int]:
        """Each partition's part lands after a while, behind what this producer sent there before."""
        world = self._world
        parts: dict[Partition | None, list[int]] = {}
        for index, message in enumerate(messages):
            parts.setdefault(None if self.conditional else message.partition, []).append(index)
        last_s = world.now_s
        pieces: list[tuple[list[int], _Piece]] = []
        for lane, indices in parts.items():
            part = [messages[index] for index in indices]
            cut = int(world.rng.integers(0, len(part) + 1))
            if self.conditional:
                cut = len(part) * (2 * cut > len(part))
            piece = _Piece(part, cut)
            at_s = max(self._lanes.get(lane, 0.0) + LANE_GAP_S, world.now_s + world.delay_s())
            self._lanes[lane] = at_s
            self._under_way[piece] = None
            world.at(at_s - world.now_s, lambda piece=piece: self._land(piece))  # type: ignore[misc]
            pieces.append((indices, piece))
            last_s = max(last_s, at_s)
        await asyncio.sleep(last_s - world.now_s + LANE_GAP_S)
        offsets = dict.fromkeys(range(len(messages)), 0)
        for indices, piece in pieces:
            if piece.error is not None:
                raise piece.error
            offsets |= zip(indices, piece.offsets, strict=False)  # a killed producer's may be fewer
        return list(offsets.values())

    def _land(self, piece: _Piece) -> None:
        """A commit that comes too late for its offset is refused; whoever asked for it may have stopped
        waiting."""
        self._under_way.pop(piece, None)
        try:
            piece.offsets = (self._broker.commit if self.conditional else self._broker.put)(piece.messages)
        except OffsetTaken as error:
            piece.error = error

    def _cut_off(self) -> None:
        for piece in self._under_way:
            piece.messages = piece.messages[: piece.cut]

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        del batch_ms
        return _Reader(self, self._broker, start)


class _Reader:
    """Reads with delays, and now and then only a few records."""

    def __init__(self, connection: Connection, broker: Broker, start: Mapping[Partition, int]) -> None:
        self._connection = connection
        self._broker = broker
        self._positions = dict(start)
        self._kind = f"read {KINDS.get(next(iter(start)).topic, 'others')}"

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    async def close(self) -> None:
        pass

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        world = self._broker.world
        await self._connection.gate(self._kind)
        until_s = None if timeout_ms is None else world.now_s + timeout_ms / 1_000
        while not self._available():
            left_s = None if until_s is None else until_s - world.now_s
            if left_s is not None and left_s <= 0:
                return []
            await self._broker.changed(list(self._positions), left_s)
        await asyncio.sleep(world.delay_s())
        await self._connection.gate(self._kind)
        if not world.calm:
            max_records = min(max_records, int(world.rng.integers(1, 2 * FEW_RECORDS)))
        return self._take(max_records)

    def _available(self) -> bool:
        found = False
        for partition, position in self._positions.items():
            first, end = self._broker.first(partition), self._broker.end(partition)
            if not first <= position <= end:
                raise OffsetOutOfRange(f"{partition} holds offsets {first} to {end}, asked for {position}")
            found = found or position < end
        return found

    def _take(self, max_records: int) -> list[Record]:
        """Each partition in its order; which partition first changes from read to read."""
        self._available()
        taken: list[Record] = []
        for partition, position in self._positions.items():
            part = self._broker.records(partition)[position : position + max_records - len(taken)]
            taken += part
            self._positions[partition] = position + len(part)
        first = next(iter(self._positions))
        self._positions[first] = self._positions.pop(first)
        return taken
