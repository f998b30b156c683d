"""The log of a life: append-only partitions, read by position; late and overtaking as Kafka allows it.

What one producer appends to one partition lands in its order. Everything else may overtake: topics each other,
producers each other, readers each other. An append whose producer died before it was acknowledged has landed
whole, in part, or not at all, and may still land later.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.model.envelope import Envelope, Headers, to_wire
from penstock.model.event import Event
from penstock.model.topics import Topic
from tests.faults.lab.world import Loop, World


class Record(NamedTuple):
    """One record. `value`: bytes; of an order, the order itself."""

    value: Any
    headers: Headers = ()
    id: str = ""


class Partition:
    """One totally ordered sequence of records and who waits for more of it."""

    def __init__(self, topic: str, key: str) -> None:
        self.topic = topic
        self.key = key
        self.records: list[Record] = []
        self.readers: list[Loop] = []

    @property
    def end(self) -> int:
        return len(self.records)


class Append:
    """One append on its way."""

    def __init__(self, partition: Partition, records: Sequence[Record], done: Callable[[], None]) -> None:
        self.partition = partition
        self.records = records
        self.done = done
        self.landed = False
        self.cut: int | None = None
        """Set when its producer dies before it lands: so many of its records will land all the same."""


class Log:
    """All partitions. `landed` sees every record as it lands: (partition, offset, record)."""

    def __init__(self, world: World, landed: Callable[[Partition, int, Record], None]) -> None:
        self._world = world
        self._landed = landed
        self._partitions: dict[tuple[str, str], Partition] = {}
        self._lanes: dict[tuple[str, str, str], float] = {}

    def partition(self, topic: Topic, key: str = "") -> Partition:
        name = (str(topic), key)
        found = self._partitions.get(name)
        if found is None:
            found = self._partitions[name] = Partition(*name)
        return found

    def read(self, reader: Loop, *partitions: Partition) -> None:
        """From now on, new records kick this reader."""
        for partition in partitions:
            partition.readers.append(reader)

    def append(
        self,
        producer: str,
        partition: Partition,
        records: Sequence[Record],
        done: Callable[[], None] = lambda: None,
    ) -> Append:
        """Lands after a while, behind what this producer sent there before; then `done` is told."""
        lane = (producer, partition.topic, partition.key)
        at_s = max(self._lanes.get(lane, 0.0), self._world.now_s + self._world.delay_s())
        self._lanes[lane] = at_s
        append = Append(partition, records, done)
        self._world.at(at_s - self._world.now_s, lambda: self._land(append))
        return append

    def put(self, partition: Partition, record: Record) -> None:
        """Lands at once."""
        self._land(Append(partition, [record], lambda: None))

    def cut_off(self, append: Append) -> None:
        """Its producer died: a part of it may land all the same."""
        if not append.landed and append.cut is None:
            append.cut = int(self._world.rng.integers(0, len(append.records) + 1))

    def _land(self, append: Append) -> None:
        partition = append.partition
        records = append.records if append.cut is None else append.records[: append.cut]
        append.landed = True
        for record in records:
            partition.records.append(record)
            self._landed(partition, partition.end - 1, record)
        partition.readers = [loop for loop in partition.readers if loop.life.alive]
        for loop in partition.readers:
            loop.kick()
        if append.cut is None:
            append.done()


def wire(event: Event, event_id: str, source: str, time_ms: int) -> Record:
    """An event as it stands in the log."""
    headers, value = to_wire(Envelope(event_id, source, time_ms, event))
    return Record(value, headers, event_id)
