"""Windows of telemetry by Faust on real Kafka are those that the plain reader makes of the same telemetry,
also after a kill."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from infra.devservers.kafka import ADMIN, KafkaBroker, kafka_broker
from penstock.clock import wall_ms
from penstock.errors import ConfigurationError, LogError, NotAllowed
from penstock.ledger.replica.replica import Replica
from penstock.log.kafka.aiokafka_gaps import alter_topic_configs
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log
from penstock.log.port import Message, Partition
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.proposals import CoresProposed
from penstock.model.schema.topics import GUARD_GROUPS, NODE_PARTITIONS, Topic
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock.scheduling.acting.telemetry_windows import HELD_WINDOWS, WINDOW_MS, NodeWindow, window_of
from penstock_services.contention_guard.shell.faust_windows import PROCESS, FaustWindows
from penstock_services.contention_guard.shell.service import Watcher
from penstock_services.contention_guard.shell.windows import LogWindows
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.support.node_reporter.telemetry import garbage, load, message, sample
from tests.support.waiting import await_until

pytestmark = pytest.mark.kafka

BEGIN_MS = (
    window_of(wall_ms()) - 60_000
)  # lately: the broker deletes what is older than a week, in the middle of a test
TELEMETRY = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
CHANGELOG = [Partition(Topic.GUARD_WINDOWS, index) for index in range(NODE_PARTITIONS)]
POSITIONS = [Partition("__consumer_offsets", index) for index in range(4)]
COMMIT_S = 2.0  # as in faust_table, which imports Faust

Windows = dict[tuple[str, int], NodeWindow]
"""By node and begin."""

_cells = count(1)


@pytest.fixture(scope="module")
def broker(kafka: KafkaBroker) -> KafkaBroker:
    """With Penstock's topics; telemetry has the times that a test gives it, so that a test of an hour takes
    seconds."""
    kafka.create_topics()

    asyncio.run(changed(kafka, Topic.TELEMETRY, "retention.ms", "-1"))
    asyncio.run(changed(kafka, Topic.TELEMETRY, "message.timestamp.type", "CreateTime"))
    return kafka


async def changed(broker: KafkaBroker, topic: str, setting: str, value: str) -> None:
    """By an administrator's tool; a controller confirms it before the broker has applied it."""
    admin = AIOKafkaAdminClient(**broker.client_settings())
    await admin.start()
    await alter_topic_configs(admin, {topic: {setting: value}})
    await admin.close()
    async with kafka_log(broker.url()) as log:
        found = await log.topics.describe([topic])

        async def applied() -> bool:
            return value in {each.found for each in await log.topics.differences(found)}

        await await_until(applied, f"{setting} {value} of {topic} at the broker")


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


@contextlib.asynccontextmanager
async def by_faust(url: str, cell: int) -> AsyncIterator[tuple[FaustWindows, Windows]]:
    windows = FaustWindows(url, cell)
    try:
        yield windows, by_key(await windows.begin())
    finally:
        await windows.close()


@contextlib.asynccontextmanager
async def kafka_log(url: str) -> AsyncIterator[KafkaLog]:
    log = open_log(url, "contention-guard")
    assert isinstance(log, KafkaLog)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def plain(url: str) -> Windows:
    async with kafka_log(url) as log:
        windows = LogWindows(log)
        try:
            return by_key(await windows.begin())
        finally:
            await windows.close()


def by_key(windows: Iterable[NodeWindow]) -> Windows:
    return {(window.node_id, window.begin_ms): window for window in windows}


def reading_processes() -> list[psutil.Process]:
    """Those that run Faust for this test."""
    return [child for child in psutil.Process().children(recursive=True) if PROCESS in child.cmdline()]


def reading_process() -> psutil.Process:
    """The only one."""
    [found] = reading_processes()
    return found


async def test_the_same_telemetry_gives_the_same_windows(
    broker: KafkaBroker, cell: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes report, resend after outages, some late, and one reporter is broken: a guard starts on that and
    then follows.

    Variables that Faust would take for its own settings change nothing.
    """
    monkeypatch.setenv("BROKER_URL", "kafka://127.0.0.1:1")
    monkeypatch.setenv("WEB_ENABLED", "1")
    nodes = [f"equal{number}" for number in range(20)]
    await append(broker, over_time(load(1, 2_000, nodes), 1))
    await append(broker, over_time(garbage(nodes[0]), 2))
    expected = await plain(broker.url())
    assert {node for node, _ in expected} >= set(nodes)
    assert len([key for key in expected if key[0] == nodes[1]]) == HELD_WINDOWS
    async with by_faust(broker.url(), cell) as (windows, seen):
        assert seen == expected
        await append(broker, over_time(load(2, 500, nodes), 3))
        expected = await plain(broker.url())
        while any(seen.get(key) != window for key, window in expected.items()):
            seen |= by_key(await windows.read())


async def until_it_ends(windows: FaustWindows) -> None:
    while True:
        await windows.read()


@pytest.mark.slow
async def test_a_guard_that_is_killed_under_load_loses_no_sample(broker: KafkaBroker, cell: int) -> None:
    """Out of memory, twice: each time in the middle of what it reads and writes."""
    nodes = [f"killed{number}" for number in range(20)]
    for seed in range(2):
        async with by_faust(broker.url(), cell) as (windows, found):
            assert found == await plain(broker.url())
            await append(broker, over_time(load(10 + seed, 2_000, nodes), seed))
            await windows.read()
            reading_process().kill()
            with pytest.raises(LogError, match="has ended"):
                await until_it_ends(windows)
    async with by_faust(broker.url(), cell) as (_, after):
        assert after == await plain(broker.url())


@pytest.mark.slow
async def test_after_a_kill_the_changelog_has_the_windows(broker: KafkaBroker, cell: int) -> None:
    """A guard was away for longer than telemetry is retained: what it had merged is read from its own
    topic."""
    await append(broker, over_time(load(20, 500, [f"quiet{number}" for number in range(5)]), 20))
    expected = await plain(broker.url())
    async with by_faust(broker.url(), cell) as (_, found):
        assert found == expected
        async with kafka_log(broker.url()) as log:
            end = await log.end_offsets(TELEMETRY)
            read = {place: offset for place, offset in end.items() if offset}

            async def committed() -> bool:
                return read.items() <= (await log.committed(f"{GUARD_GROUPS}{cell}")).items()

            await await_until(committed, f"the guard to commit {read}")
            await log.delete_before(end)
        reading_process().kill()
    assert not await plain(broker.url())
    async with by_faust(broker.url(), cell) as (_, after):
        assert after == expected


async def follow(windows: FaustWindows, seen: Windows) -> None:
    """Until it is cancelled, or its process is killed."""
    with contextlib.suppress(LogError):
        while True:
            seen |= by_key(await windows.read())


async def until_seen(expected: Windows, *seen: Windows) -> None:
    """Each window by one of them, as it is in the end."""
    await await_until(
        lambda: all(any(each.get(key) == window for each in seen) for key, window in expected.items()),
        lambda: [key for key, window in expected.items() if all(each.get(key) != window for each in seen)],
    )


@pytest.mark.slow
async def test_two_guards_of_a_cell_share_its_nodes(broker: KafkaBroker, cell: int) -> None:
    """A new version is started beside the old one, and fails: the old one goes on with the windows of
    both."""
    nodes = [f"shared{number}" for number in range(20)]
    async with by_faust(broker.url(), cell) as (old, by_old):
        first = reading_process()
        async with by_faust(broker.url(), cell) as (new, by_new):
            following = [asyncio.create_task(follow(*each)) for each in ((old, by_old), (new, by_new))]
            await append(broker, over_time(load(50, 500, nodes), 50))
            await until_seen(await plain(broker.url()), by_old, by_new)
            for process in reading_processes():
                if process != first:
                    process.kill()
            await append(broker, over_time(load(51, 500, nodes), 51))
            await until_seen(await plain(broker.url()), by_old)
            for task in following:
                task.cancel()


@pytest.mark.slow
async def test_nothing_is_written_while_nothing_happens(broker: KafkaBroker, cell: int) -> None:
    """A cell without news: Kafka's own heartbeats go on underneath, and the log does not grow."""
    await append(broker, over_time(load(30, 100, ["idle"]), 30))
    async with by_faust(broker.url(), cell) as (windows, found), kafka_log(broker.url()) as log:
        assert found
        before: dict[Partition, int] = {}

        async def settled() -> bool:
            last = dict(before)
            await asyncio.sleep(3 * COMMIT_S / 2)  # clock: in which positions of what was read are committed
            before.update(await log.end_offsets([*CHANGELOG, *TELEMETRY, *POSITIONS]))
            return before == last

        await await_until(settled, "the positions of what was read")
        reading = asyncio.ensure_future(windows.read())
        await asyncio.sleep(3 * COMMIT_S)  # clock: in which something would be written
        assert await log.end_offsets([*CHANGELOG, *TELEMETRY, *POSITIONS]) == before
        assert not reading.done()
        reading.cancel()


@pytest.mark.slow
async def test_a_guard_ends_soon_though_the_broker_is_away(broker: KafkaBroker, cell: int) -> None:
    """Kafka fails under load, then the guard is stopped: Faust alone would wait for its last writes for
    ever."""
    async with by_faust(broker.url(), cell) as (windows, _):
        process = reading_process()
        await append(broker, over_time(load(41, 3_000, ["away1", "away2"]), 41))
        await windows.read()
        await asyncio.to_thread(broker.kill9)
    try:
        assert not process.is_running()
    finally:
        await asyncio.to_thread(broker.restart)


@pytest.mark.slow
async def test_the_guards_identity_may_do_exactly_this(folder: Path, cell: int) -> None:
    """A broker that refuses what acls.yaml does not name, over TLS: the guard needs no more, and others may
    not do it."""
    with kafka_broker(folder, security="tls") as own:
        await asyncio.to_thread(own.create_topics)
        async with kafka_log(own.url("node-reporter")) as node:
            await node.append([message("s1", sample(step_ms=100.0))])
        url = own.url("contention-guard")
        async with by_faust(url, cell) as (windows, found):
            assert found == await plain(url)
            assert [node_id for node_id, _ in found] == ["n1"]
            async with kafka_log(own.url("node-reporter")) as node:
                await node.append([message("s2", sample("n2", step_ms=50.0))])
            [changed] = await windows.read()
            assert changed.node_id == "n2"
        async with kafka_log(url) as log:
            assert await log.committed(f"{GUARD_GROUPS}{cell}")
            with pytest.raises(NotAllowed):
                await log.committed("another-group")
        migrators = FaustWindows(own.url("migrator"), cell)
        with pytest.raises(NotAllowed, match="migrator"):
            await migrators.begin()
        await migrators.close()
        async with kafka_log(own.url(ADMIN)) as admin:
            topics = await admin.topics.describe([Topic.GUARD_WINDOWS])
            assert not await admin.topics.differences(topics)


@pytest.mark.slow
async def test_a_changelog_that_forgets_is_refused(broker: KafkaBroker, cell: int) -> None:
    """An administrator made the topic by hand, with Kafka's defaults."""
    async with kafka_log(broker.url()) as log:
        topics = await log.topics.describe([Topic.GUARD_WINDOWS])
        await changed(broker, Topic.GUARD_WINDOWS, "cleanup.policy", "delete")
        windows = FaustWindows(broker.url(), cell)
        try:
            with pytest.raises(ConfigurationError, match=r"cleanup\.policy is delete, must be compact"):
                await windows.begin()
        finally:
            await windows.close()
            await log.topics.correct(topics)


@pytest.mark.slow
async def test_the_service_on_kafka_hears_by_faust(broker: KafkaBroker) -> None:
    """A training reports its step times: the guard's process asks for other cores, and Faust's ends with its
    attempt."""
    cell = CellDriver(PlacerSettings(profile="fifo", contention=Contention()))
    cell.join(node_spec("n1", cores=24))
    cell.submit("a", need=estimate(1, cores=4))
    cell.start("a")
    async with kafka_log(broker.url()) as log:
        await log.append([Message(Partition(Topic.LEDGER, 0), value) for value in cell.values])
        ready = asyncio.Event()
        working = asyncio.ensure_future(
            Watcher(Settings(log_url=broker.url()), log, Tracing(), Replica()).work(ready)
        )
        await ready.wait()
        process = reading_process()
        for number in range(3):
            await log.append([message(f"s{number}", sample(step_ms=100.0))])
            await asyncio.sleep(
                0.5
            )  # clock: so that they are of windows one after another; any number will do
        reader = log.reader({Partition(Topic.PROPOSALS, 0): 0})
        [found] = await reader.read()
        proposal = from_wire(found.headers, found.value).data
        assert isinstance(proposal, CoresProposed)
        assert (proposal.task_id, proposal.cause) == ("a.1.w0", "probe")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await reader.close()
    assert not process.is_running()
