"""Load on a log while its servers die, and what it promises: acknowledged is read once, unknown at most once,
in order."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from penstock.errors import AppendFailed
from penstock.log.port import Log, Message, Partition, Record
from tests.support.waiting import await_until

WRITERS = 4
KILLS = 3
BETWEEN_KILLS = 200  # acknowledged records: a second or less


class Load:
    """Writers that append numbered records until they are stopped, and the answer to each."""

    def __init__(self, log: Log, partition: Partition) -> None:
        self.log = log
        self.partition = partition
        self.acknowledged: dict[bytes, int] = {}
        self.unknown: set[bytes] = set()
        self.stopping = False

    async def write(self, writer: int) -> None:
        number = 0
        while not self.stopping:
            value = f"{writer}:{number}".encode()
            try:
                offsets = await self.log.append([Message(self.partition, value)])
            except AppendFailed:
                self.unknown.add(value)
            else:
                self.acknowledged[value] = offsets[0]
            number += 1
            await asyncio.sleep(0.001)  # clock: so that the servers get their turn


async def run_under_kills(
    one: Log, two: Log, partition: Partition, kill: Callable[[], Awaitable[None]], *, until_hit: bool = False
) -> Load:
    """Load on one connection, readers on both, kills in between; checks the promise at the end.

    `until_hit`: more than `KILLS`, until one has hit an append in flight.
    """
    load = Load(one, partition)
    seen: tuple[list[Record], list[Record]] = ([], [])
    readers = [one.reader({partition: 0}), two.reader({partition: 0})]

    async def read(index: int) -> None:
        while True:
            seen[index].extend(await readers[index].read())

    writing = [asyncio.create_task(load.write(writer)) for writer in range(WRITERS)]
    reading = [asyncio.create_task(read(index)) for index in range(2)]
    try:
        kills = 0
        while kills < KILLS or (until_hit and not load.unknown):
            await acknowledged(load, BETWEEN_KILLS)
            await kill()
            kills += 1
        await acknowledged(load, BETWEEN_KILLS)  # it works again
        load.stopping = True
        await asyncio.gather(*writing)
        end = (await one.end_offsets([partition]))[partition]

        def all_read() -> bool:
            assert not any(task.done() for task in reading), "a reader did not sit the outage out"
            return all(records and records[-1].offset == end - 1 for records in seen)

        await await_until(all_read, f"all that lies before {end}")
    finally:
        for task in (*writing, *reading):
            task.cancel()
        await asyncio.gather(*writing, *reading, return_exceptions=True)
        for reader in readers:
            await reader.close()
    judge(load, *seen)
    return load


async def acknowledged(load: Load, count: int) -> None:
    """Waits until so many more are."""
    before = len(load.acknowledged)
    await await_until(
        lambda: len(load.acknowledged) >= before + count, lambda: f"{count} more than {before} records"
    )


def judge(load: Load, first: list[Record], second: list[Record]) -> None:
    assert [(record.offset, record.value) for record in first] == [
        (record.offset, record.value) for record in second
    ]
    offsets = [record.offset for record in first]
    assert offsets == sorted(set(offsets))
    times = Counter(record.value for record in first)
    assert max(times.values()) == 1, "a record was written twice"
    place = {record.value: record.offset for record in first}
    lost = [value for value, offset in load.acknowledged.items() if place.get(value) != offset]
    assert not lost, f"{len(lost)} acknowledged records are lost or elsewhere"
    assert set(place) <= set(load.acknowledged) | load.unknown
    for writer in range(WRITERS):
        numbers = [int(value.split(b":")[1]) for value in place if value.startswith(b"%d:" % writer)]
        assert numbers == sorted(numbers), "a writer's records changed order"
