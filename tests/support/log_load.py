"""Load on a log while its servers die, and what it promises: acknowledged is read once, unknown at most once, in order."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from penstock.errors import AppendFailed
from penstock.log.port import Log, Message, Partition, Record

WRITERS = 4
KILLS = 3
BETWEEN_KILLS_S = 0.7


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
            await asyncio.sleep(0.001)


async def run_under_kills(
    one: Log, two: Log, partition: Partition, kill: Callable[[], Awaitable[None]], most_kills: int = KILLS
) -> Load:
    """Load on one connection, readers on both, kills in between; checks the promise at the end.

    Up to `most_kills`, until one has hit an append in flight.
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
        for count in range(most_kills):
            if count >= KILLS and load.unknown:
                break
            await asyncio.sleep(BETWEEN_KILLS_S)
            await kill()
        before = len(load.acknowledged)
        await until(lambda: len(load.acknowledged) >= before + 100)  # it works again
        load.stopping = True
        await asyncio.gather(*writing)
        end = (await one.end_offsets([partition]))[partition]
        await until(lambda: all(records and records[-1].offset == end - 1 for records in seen))
        assert not any(task.done() for task in reading), "a reader did not sit the outage out"
    finally:
        for task in (*writing, *reading):
            task.cancel()
        await asyncio.gather(*writing, *reading, return_exceptions=True)
        for reader in readers:
            await reader.close()
    judge(load, *seen)
    return load


async def until(condition: Callable[[], bool], patience_s: float = 40) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.05)


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
