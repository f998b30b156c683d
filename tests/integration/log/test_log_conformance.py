"""One suite, three logs."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from penstock.log.kafka.kafka import KafkaLog
from penstock.log.port import Log
from penstock.log.postgres.embedded import EmbeddedLog
from tests.support.log.log_conformance import LogConformance, LogFactory
from tests.support.log.memory_log import MemoryBroker, MemoryLog


@pytest.fixture
def topic(topic_name: Callable[[str], str]) -> str:
    return topic_name("conformance")


async def opened(make: Callable[[str], Log]) -> AsyncIterator[LogFactory]:
    """A factory of started logs, closed at the end."""
    logs: list[Log] = []

    async def factory(identity: str) -> Log:
        log = make(identity)
        logs.append(log)
        await log.start()
        return log

    yield factory
    for log in logs:
        await log.close()


class TestMemoryLog(LogConformance):
    @pytest_asyncio.fixture
    async def log_factory(self) -> AsyncIterator[LogFactory]:
        broker = MemoryBroker()
        async for factory in opened(lambda identity: MemoryLog(broker, identity)):
            yield factory


class TestConditionalMemoryLog(LogConformance):
    @pytest_asyncio.fixture
    async def log_factory(self) -> AsyncIterator[LogFactory]:
        broker = MemoryBroker(conditional=True)
        async for factory in opened(lambda identity: MemoryLog(broker, identity)):
            yield factory


@pytest.mark.postgres
class TestEmbeddedLog(LogConformance):
    @pytest_asyncio.fixture
    async def log_factory(self, dsn: str) -> AsyncIterator[LogFactory]:
        async for factory in opened(lambda identity: EmbeddedLog(dsn, identity)):
            yield factory


@pytest.mark.kafka
class TestKafkaLog(LogConformance):
    @pytest_asyncio.fixture
    async def log_factory(self, kafka_bootstrap: str) -> AsyncIterator[LogFactory]:
        async for factory in opened(lambda identity: KafkaLog(kafka_bootstrap, identity)):
            yield factory
