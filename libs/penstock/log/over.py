"""A log over another one: everything is the inner log's,
but for what a subclass reads in a way of its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeVar

from penstock.log.port import Log, Message, Partition, Reader

Layer = TypeVar("Layer", bound="LogOver")


def layer(log: Log, kind: type[Layer]) -> Layer | None:
    """The layer of this kind in a log over others; None: there is none."""
    while isinstance(log, LogOver):
        if isinstance(log, kind):
            return log
        log = log.inner
    return None


class LogOver:
    """Implements `penstock.log.port.Log` by `inner`."""

    def __init__(self, inner: Log) -> None:
        self.inner = inner

    @property
    def conditional(self) -> bool:
        return self.inner.conditional

    async def start(self) -> Self:
        await self.inner.start()
        return self

    async def create(self, topics: Mapping[str, int]) -> None:
        await self.inner.create(topics)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        return await self.inner.append(messages)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        return self.inner.reader(start, batch_ms=batch_ms)

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self.inner.end_offsets(partitions)

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self.inner.begin_offsets(partitions)

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        await self.inner.delete_before(offsets)

    async def close(self) -> None:
        await self.inner.close()
