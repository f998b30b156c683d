"""Windows of telemetry by Faust on real Kafka are those that the plain reader makes of the same telemetry, also after a kill."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import numpy as np
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from infra.devservers.kafka import KafkaBroker
from penstock.log.aiokafka_gaps import alter_topic_configs
from penstock.log.kafka import KafkaLog
from penstock.log.port import Message, Partition
from penstock.model.topics import GUARD_GROUPS, NODE_PARTITIONS, Topic, node_partition
from penstock.policies.telemetry_windows import WINDOW_MS, NodeWindow
from penstock_services.contention_guard.shell.faust_windows import FaustWindows
from penstock_services.contention_guard.shell.windows import HELD_WINDOWS, LogWindows
from tests.support.telemetry import garbage, load, message, sample

pytestmark = pytest.mark.kafka

BEGIN_MS = 1_700_000_000_000
TELEMETRY = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
CHANGELOG = [Partition(Topic.GUARD_WINDOWS, index) for index in range(NODE_PARTITIONS)]
PROCESS = "tests.support.window_process"
LONG_S = 60.0

_cells = count()


@pytest.fixture(scope="module")
def broker(kafka: KafkaBroker) -> Iterator[KafkaBroker]:
    """With Penstock's topics; telemetry has the times that a test gives it, so that a test of an hour takes seconds."""
    kafka.create_topics()

    async def own_times() -> None:
        admin = AIOKafkaAdminClient(**kafka.client_settings())
        await admin.start()
        await alter_topic_configs(admin, {Topic.TELEMETRY: {"message.timestamp.type": "CreateTime"}})
        await admin.close()

    asyncio.run(own_times())
    return kafka


@pytest.fixture
def cell() -> int:
    """Of a guard that no other test has run: its group has read nothing."""
    return next(_cells)


async def append(broker: KafkaBroker, timed: Iterable[tuple[int, Message]]) -> None:
    """(time at which the log took it, record), in this order."""
    async with AIOKafkaProducer(**broker.client_settings()) as producer:
        waiting = [
            await producer.send(
                one.partition.topic, one.value, one.key, one.partition.index, at_ms, list(one.headers)
            )
            for at_ms, one in timed
        ]
        await asyncio.gather(*waiting)


def over_time(messages: Iterable[Message], seed: int, windows: int = 12) -> Iterator[tuple[int, Message]]:
    """Spread over so many windows, a tenth of them late or early by some."""
    random = np.random.default_rng(seed)
    together = list(messages)
    for number, one in enumerate(together):
        jump_ms = random.integers(-3, 3) * WINDOW_MS if random.random() < 0.1 else 0
        yield BEGIN_MS + number * windows * WINDOW_MS // len(together) + int(jump_ms), one


@asynccontextmanager
async def by_faust(broker: KafkaBroker, cell: int) -> AsyncIterator[tuple[FaustWindows, Sequence[NodeWindow]]]:
    windows = FaustWindows(KafkaLog(broker.bootstrap, "contention-guard"), cell)
    try:
        yield windows, await asyncio.wait_for(windows.begin(), LONG_S)
    finally:
        await windows.close()


async def plain(broker: KafkaBroker) -> dict[tuple[str, int], NodeWindow]:
    log = await KafkaLog(broker.bootstrap, "contention-guard").start()
    windows = LogWindows(log)
    try:
        return by_key(await windows.begin())
    finally:
        await windows.close()
        await log.close()


def by_key(windows: Iterable[NodeWindow]) -> dict[tuple[str, int], NodeWindow]:
    return {(window.node_id, window.begin_ms): window for window in windows}


async def test_the_same_telemetry_gives_the_same_windows(broker: KafkaBroker, cell: int) -> None:
    """Nodes report, resend after outages, some late, and one reporter is broken: a guard starts on that and then follows."""
    nodes = [f"equal{number}" for number in range(20)]
    await append(broker, over_time(load(1, 2_000, nodes), 1))
    await append(broker, over_time(garbage(nodes[0]), 2))
    expected = await plain(broker)
    assert {node for node, _ in expected} >= set(nodes)
    assert len([key for key in expected if key[0] == nodes[1]]) == HELD_WINDOWS
    async with by_faust(broker, cell) as (windows, found):
        assert by_key(found) == expected
        assert windows.unreadable == 4
        seen = by_key(found)
        await append(broker, over_time(load(2, 500, nodes), 3))
        expected = await plain(broker)
        async with asyncio.timeout(LONG_S):
            while any(seen.get(key) != window for key, window in expected.items()):
                seen |= by_key(await windows.read())


@asynccontextmanager
async def process(broker: KafkaBroker, cell: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed at the end, without a warning."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", PROCESS, broker.url(), str(cell), stdout=asyncio.subprocess.PIPE, limit=1 << 26
    )
    try:
        yield started
    finally:
        started.kill()
        await started.wait()


async def printed(started: asyncio.subprocess.Process) -> dict[tuple[str, int], NodeWindow]:
    assert started.stdout is not None
    line = await asyncio.wait_for(started.stdout.readline(), LONG_S)
    return by_key(msgspec.json.decode(line, type=list[NodeWindow]))


async def test_a_guard_that_is_killed_again_and_again_loses_no_sample(broker: KafkaBroker, cell: int) -> None:
    """A guard's machine fails under load, three times: each time in the middle of what it reads and writes."""
    nodes = [f"killed{number}" for number in range(20)]
    for seed in range(3):
        async with process(broker, cell) as started:
            found = await printed(started)
            assert found == await plain(broker)
            await append(broker, over_time(load(10 + seed, 3_000, nodes), seed))
            for _ in range(3):
                await printed(started)
    async with by_faust(broker, cell) as (_, after):
        assert by_key(after) == await plain(broker)
