"""A service that folds the ledger and proposes, on the log in memory: one attempt of it, beside a cell whose
ledger is there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Message, Partition
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.topics import Topic
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from tests.support.cluster.driver import CellDriver
from tests.support.installation.services import ready_or_ended
from tests.support.log.memory_log import MemoryBroker, MemoryLog

LEDGER = Partition(Topic.LEDGER, 0)


class Attempt(Protocol):
    async def work(self, ready: asyncio.Event) -> None: ...


Found = TypeVar("Found", bound=Attempt)


@asynccontextmanager
async def attempt(
    of: Callable[[Settings, Log, Tracing, Replica], Found],
    broker: MemoryBroker,
    traces: Tracing | None = None,
) -> AsyncIterator[Found]:
    """It works inside the block, from the moment at which it is ready, or has ended."""
    settings, ready = Settings(log_url="memory"), asyncio.Event()
    found = of(settings, MemoryLog(broker), traces or Tracing(), Replica())
    work = asyncio.ensure_future(found.work(ready))
    try:
        await ready_or_ended(ready, work)
        yield found
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


class WrittenCell(CellDriver):
    """Its ledger is in the broker, up to the last `write`."""

    def __init__(self, broker: MemoryBroker, settings: PlacerSettings) -> None:
        super().__init__(settings)
        self.broker = broker
        self._written = 0

    def write(self) -> None:
        """What has come since."""
        self.broker.append("placer", [Message(LEDGER, value) for value in self.values[self._written :]])
        self._written = len(self.values)
