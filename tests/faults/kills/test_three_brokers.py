"""Three brokers that hold copies of each other's records: each dies, restarts and hands its leadership over
under load.

A record counts once it is in two copies (`min.insync.replicas=2`), so any one broker may go. Two at once end
all writes until one is back, and nothing that was acknowledged is lost then either.
"""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from infra.devservers.kafka import KafkaBroker, KafkaCluster, kafka_cluster
from penstock.errors import ConfigurationError
from penstock.log.kafka.aiokafka_gaps import alter_topic_configs
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log
from penstock.log.port import Log, Partition, Record
from penstock.model.schema.topics import Topic
from penstock.runtime.settings import Settings
from tests.faults.conftest import MakeCell
from tests.faults.kills.test_outages import live_through
from tests.support.log.log_load import WRITERS, Load, judge
from tests.support.waiting import await_until

pytestmark = pytest.mark.kafka

LEDGER = Partition(Topic.LEDGER, 0)
LOOK_S = 0.01
UNAVAILABLE_LOOKS = (
    1_000  # reach, 10 s: a dead broker's session ends after 2 s, a controller's after as long again
)
DEAD_S = 4.0  # a broker's session ends after 2 s; then its leaders are elsewhere
FLOWING = 200  # acknowledged records that show that writes go on


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with kafka_cluster() as found:
        yield found


def test_a_port_that_is_taken_before_its_use_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has bound the port of a broker between its choice and the broker's start: the brokers
    start again on other ports."""
    choose, asked = KafkaBroker.choose_ports, itertools.count()
    found = KafkaCluster(tmp_path, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def chosen(broker: KafkaBroker) -> None:
            choose(broker)
            if next(asked) == 0:
                broker.controller_port = taken.getsockname()[1]

        monkeypatch.setattr(KafkaBroker, "choose_ports", chosen)
        try:
            found.start()
            assert found.brokers[0].running
            assert next(asked) == 2, "one further choice"
        finally:
            found.kill9()


@contextlib.asynccontextmanager
async def raw_admin(cluster: KafkaCluster) -> AsyncIterator[AIOKafkaAdminClient]:
    """Connected to a broker that lives."""
    living = next(broker for broker in cluster.brokers if broker.running)
    admin = AIOKafkaAdminClient(**living.client_settings())
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def described(cluster: KafkaCluster) -> Any:
    """The ledger's only partition: its leader and its copies in sync."""
    async with raw_admin(cluster) as admin:
        [topic] = await admin.describe_topics([str(LEDGER.topic)])
    return topic["partitions"][0]


async def leader(cluster: KafkaCluster) -> KafkaBroker:
    return cluster.broker((await described(cluster))["leader"])


async def in_sync(cluster: KafkaCluster, led_by: KafkaBroker | None = None) -> None:
    """Returns once all three copies are whole again, under this leader."""

    async def whole() -> bool:
        found = await described(cluster)
        return len(found["isr"]) == len(cluster.brokers) and led_by in (None, cluster.broker(found["leader"]))

    await await_until(whole, "three copies in sync")


async def rounds(cluster: KafkaCluster, count: int) -> AsyncIterator[int]:
    """So many, by number; at the beginning of each all brokers run and hold all records."""
    for number in range(count):
        await asyncio.to_thread(cluster.start_stopped)
        await in_sync(cluster)
        yield number


class Watched(Load):
    """Remembers the longest time without any acknowledgement, in looks of this process, which are rarer on a
    busy machine."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, LEDGER)
        self.longest = 0

    async def watch(self) -> None:
        count, looks = 0, 0
        while True:
            looks += 1
            if len(self.acknowledged) > count:
                count, looks = len(self.acknowledged), 0
            self.longest = max(self.longest, looks)
            await asyncio.sleep(LOOK_S)  # clock: looks are counted, not seconds

    async def flows(self) -> None:
        before = len(self.acknowledged)
        await await_until(lambda: len(self.acknowledged) >= before + FLOWING, "acknowledged records")


@contextlib.asynccontextmanager
async def under_load(cluster: KafkaCluster) -> AsyncIterator[Watched]:
    """Writers on one connection, readers on two; at the end everything acknowledged is there once, in order,
    for both."""
    logs = [open_log(cluster.url(), name) for name in ("one", "two")]
    seen: tuple[list[Record], list[Record]] = ([], [])
    for log in logs:
        await log.start()
    await logs[0].create({Topic.LEDGER: 1})
    start = (await logs[0].end_offsets([LEDGER]))[LEDGER]
    load = Watched(logs[0])
    readers = [log.reader({LEDGER: start}) for log in logs]

    async def read(index: int) -> None:
        while True:
            seen[index].extend(await readers[index].read())

    reading = [asyncio.create_task(read(index)) for index in range(2)]
    writing = [asyncio.create_task(load.write(writer)) for writer in range(WRITERS)]
    watching = asyncio.create_task(load.watch())
    try:
        await load.flows()
        yield load
        await load.flows()
        load.stopping = True
        await asyncio.gather(*writing)
        watching.cancel()
        end = (await logs[1].end_offsets([LEDGER]))[LEDGER]
        await await_until(
            lambda: all(records and records[-1].offset == end - 1 for records in seen),
            "all records, for both",
        )
        assert not any(task.done() for task in reading), "a reader did not sit the outage out"
    finally:
        for task in (*writing, *reading, watching):
            task.cancel()
        await asyncio.gather(*writing, *reading, watching, return_exceptions=True)
        for log in logs:
            await log.close()
    judge(load, *seen)


async def test_a_topic_of_three_brokers_has_three_copies_and_counts_two(cluster: KafkaCluster) -> None:
    """What the set-up makes here is what the next test rests on; one copy in sync would be refused.

    A changed setting reaches the brokers one after the other, and any of them answers.
    """
    log = await KafkaLog(cluster.url().removeprefix("kafka://"), "admin").start()
    found = await log.topics.create({Topic.LEDGER: 1})
    assert (found[Topic.LEDGER].replicas, found[Topic.LEDGER].partitions) == (3, 1)
    async with raw_admin(cluster) as admin:
        await alter_topic_configs(admin, {Topic.LEDGER: {"min.insync.replicas": "1"}})
    why = await await_until(lambda: refused(log), "a refusal")
    assert "ledger.v1: min.insync.replicas is 1, must be 2" in why
    [corrected] = await await_until(
        lambda: log.topics.correct(found), "a broker that has something to correct"
    )
    assert (corrected.found, corrected.wanted) == ("1", "2")

    async def accepted() -> bool:
        return not await refused(log)

    await await_until(accepted, "the corrected setting")
    await log.close()


async def refused(log: KafkaLog) -> str:
    """Why the topic is not as it must be."""
    try:
        await log.create({Topic.LEDGER: 1})
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.slow
async def test_a_broker_is_killed_and_leaders_move_under_load(cluster: KafkaCluster, scale: int) -> None:
    """Its machine dies, another one leads, the first comes back and leads again; then one is stopped for an
    upgrade."""
    async with under_load(cluster) as load:
        async for number in rounds(cluster, scale):
            first = await leader(cluster) if number % 2 == 0 else cluster.brokers[number % 3]
            first.kill9()
            await load.flows()
            assert await leader(cluster) is not first
            await asyncio.to_thread(first.start)
            await in_sync(cluster, led_by=cluster.brokers[(await described(cluster))["replicas"][0] - 1])
            second = await leader(cluster)
            await asyncio.to_thread(second.stop)
            await load.flows()
            assert await leader(cluster) is not second
    report(load)
    assert load.longest <= UNAVAILABLE_LOOKS


@pytest.mark.slow
async def test_two_brokers_die_at_once(cluster: KafkaCluster, scale: int) -> None:
    """A rack loses its power: the copy that is left does not count alone, and goes on when another one is
    back."""
    async with under_load(cluster) as load:
        async for number in rounds(cluster, scale):
            await load.flows()
            victims = [cluster.brokers[number % 3], cluster.brokers[(number + 1) % 3]]
            for victim in victims:
                victim.kill9()
            await asyncio.sleep(DEAD_S)  # clock: what was under way is acknowledged, or never
            before = len(load.acknowledged)
            await asyncio.sleep(DEAD_S)  # clock: nothing must be acknowledged, and could in this time
            assert len(load.acknowledged) == before, "a record counts that only one machine holds"
            await asyncio.to_thread(victims[1].start)
            await load.flows()
    report(load)


def report(load: Watched) -> None:
    print(
        f"\n{len(load.acknowledged)} acknowledged, {len(load.unknown)} unknown, "
        f"at most {load.longest * LOOK_S:.1f} s without an acknowledgement"
    )


@pytest.mark.slow
@pytest.mark.postgres
async def test_jobs_while_brokers_die(make_cell: MakeCell, dsn: str, scale: int) -> None:
    """The whole system over three brokers, of which one after the other is killed and comes back."""
    with kafka_cluster() as cluster:
        cell = await make_cell(cluster.url(), dsn)
        victims = itertools.cycle(cluster.brokers)

        async def outage() -> None:
            victim = next(victims)
            victim.kill9()
            await asyncio.sleep(DEAD_S)  # clock: long enough dead that others lead; nothing is judged by it
            await asyncio.to_thread(victim.start)
            await in_sync(cluster)

        await live_through(cell, outage, 3 * scale, Settings(log_url=cluster.url(), dsn=dsn))
