"""A log over another one: everything is the inner log's, but for what a subclass reads in a way of its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from penstock.log.port import Log, Message, Partition, Reader


class LogOver:
    """Implements `penstock.log.port.Log` by `log`."""

    def __init__(self, log: Log) -> None:
        self.log = log

    @property
    def conditional(self) -> bool:
        return self.log.conditional

    async def start(self) -> Self:
        await self.log.start()
        return self

    async def create(self, topics: Mapping[str, int]) -> None:
        await self.log.create(topics)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        return await self.log.append(messages)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        return self.log.reader(start, batch_ms=batch_ms)

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self.log.end_offsets(partitions)

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self.log.begin_offsets(partitions)

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        await self.log.delete_before(offsets)

    async def close(self) -> None:
        await self.log.close()
