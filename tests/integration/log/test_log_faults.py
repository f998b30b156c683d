"""What the logs promise while their servers die: acknowledged is read once, unknown at most once, order is
preserved."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from infra.devservers.kafka import KafkaBroker
from penstock.errors import AppendFailed, LogError, NotAllowed
from penstock.log.kafka.aiokafka_gaps import abandon_producer
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log
from penstock.log.port import Message, Partition, Record
from penstock.log.postgres import embedded
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.schema.topics import Topic
from penstock.runtime.database.postgres_server import PostgresServer
from tests.support.log.log_load import run_under_kills
from tests.support.waiting import await_until


@pytest.fixture
def broker(kafka: KafkaBroker) -> KafkaBroker:
    """It runs, even if a test before this one has killed it and failed."""
    kafka.start()
    return kafka


@pytest.mark.postgres
async def test_postgres_is_killed_under_load(postgres_folder: Path) -> None:
    """The machine's out-of-memory killer picks Postgres, three times at least, while the pipeline runs."""
    server = PostgresServer()
    dsn = await server.start(postgres_folder / "pg")
    one, two = EmbeddedLog(dsn, "one"), EmbeddedLog(dsn, "two")
    try:
        await one.start()
        await two.start()
        await one.create({"penstock.test.v1": 1})

        async def kill() -> None:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            assert await server.start(postgres_folder / "pg") == dsn

        load = await run_under_kills(one, two, Partition("penstock.test.v1", 0), kill, until_hit=True)
        assert load.unknown
    finally:
        await one.close()
        await two.close()
        await server.stop()


@pytest.mark.postgres
async def test_a_log_comes_back_after_a_long_outage(
    postgres_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres is away for longer than a log waits: callers are refused meanwhile, and served as soon as it
    is back."""
    monkeypatch.setattr(embedded, "OUTAGE_LIMIT_S", 0.2)
    partition = Partition("penstock.test.v1", 0)
    server = PostgresServer()
    log = EmbeddedLog(await server.start(postgres_folder / "pg"), "one")
    try:
        await log.start()
        await log.create({partition.topic: 1})
        reader = log.reader({partition: 0})
        await server.stop()
        with pytest.raises(LogError, match="stayed away"):
            await reader.read()
        with pytest.raises(LogError, match="stayed away"):
            await log.end_offsets([partition])
        await server.start(postgres_folder / "pg")
        found: list[Record] = []

        async def back() -> bool:
            with suppress(LogError):
                await log.append([Message(partition, b"after the outage")])
                found.extend(await log.reader({partition: 0}).read())
            return bool(found)

        await await_until(back, "the log to be back")
        assert found[0].value == b"after the outage"
    finally:
        await log.close()
        await server.stop()


@pytest.mark.postgres
async def test_a_record_committed_while_nobody_listens(dsn: str) -> None:
    """An administrator ends our listening connection; one last record arrives just then, and nothing after
    it."""
    partition = Partition("penstock.test.v1", 0)
    one, two = await EmbeddedLog(dsn, "one").start(), await EmbeddedLog(dsn, "two").start()
    administrator = await asyncpg.connect(dsn)
    end_listener = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE application_name = 'penstock one' AND pid <> $1 AND datname = current_database()"""
    try:
        await one.create({partition.topic: 1})
        reader = one.reader({partition: 0})
        for number in range(10):
            waiting = asyncio.create_task(reader.read())
            await asyncio.sleep(
                0.01
            )  # clock: by then it has nearly always caught up, and waits for a notification

            async def ended() -> bool:
                return len(await administrator.fetch(end_listener, one._writer_pid)) == 1

            await await_until(ended, "the end of its connection")
            await two.append([Message(partition, b"%d" % number)])
            assert [record.value for record in await waiting] == [b"%d" % number]
        await reader.close()
    finally:
        await administrator.close()
        await one.close()
        await two.close()


@pytest.mark.kafka
async def test_kafka_is_killed_under_load(broker: KafkaBroker, topic_name: Callable[[str], str]) -> None:
    """The broker is killed and comes back, three times, while the pipeline runs: aiokafka repeats, never
    doubles."""
    one, two = KafkaLog(broker.bootstrap, "one"), KafkaLog(broker.bootstrap, "two")
    topic = topic_name("test")
    try:
        await one.start()
        await two.start()
        await one.create({topic: 1})

        async def kill() -> None:
            broker.kill9()
            await asyncio.sleep(0.5)  # clock: the writers run into it, as often as they may
            await asyncio.to_thread(broker.start)

        await run_under_kills(one, two, Partition(topic, 0), kill)
    finally:
        await one.close()
        await two.close()


@pytest.mark.kafka
async def test_a_closed_producer_writes_nothing_later(broker: KafkaBroker) -> None:
    """A placer gives up during an outage: what it still held must not reach the ledger when the broker
    returns."""
    partition = Partition(Topic.LEDGER, 0)
    log = await KafkaLog(broker.bootstrap, "placer").start()
    await log.create({Topic.LEDGER: 1})
    await log.append([Message(partition, b"before")])
    broker.kill9()
    late = asyncio.create_task(log.append([Message(partition, b"held back")]))
    await asyncio.sleep(0.5)  # clock: in which it is taken over by the producer
    await log.close()
    with pytest.raises(AppendFailed):
        await late
    await asyncio.to_thread(broker.start)
    other = await KafkaLog(broker.bootstrap, "successor").start()
    await asyncio.sleep(0.5)  # clock: in which it would be written
    assert await other.append([Message(partition, b"after")]) == [1]
    await other.close()


@pytest.mark.kafka
async def test_aiokafka_still_waits_without_bound_when_it_stops(
    broker: KafkaBroker, topic_name: Callable[[str], str]
) -> None:
    """aio-libs/aiokafka#1101: hence `abandon_producer`. When this fails, that workaround is to be removed."""
    topic = topic_name("test")
    log = await KafkaLog(broker.bootstrap, "test").start()
    await log.create({topic: 1})
    await log.close()
    producer = AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap, acks="all", enable_idempotence=True, request_timeout_ms=1_000
    )  # clock: what it may wait for one answer, and does not heed
    await producer.start()
    await producer.send_and_wait(topic, b"before")
    broker.kill9()
    late = await producer.send(topic, b"held back")
    stopping = asyncio.create_task(producer.stop())
    await asyncio.wait(
        [stopping], timeout=2
    )  # clock: twice what it may wait; one that ends later is a fault missed
    assert not stopping.done()
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await abandon_producer(producer)
    assert late.exception() is not None


@pytest.mark.kafka
async def test_only_the_placer_writes_the_ledger(guarded_kafka: KafkaBroker) -> None:
    """A gateway with a bug (or a thief of its password) writes the ledger: refused, and its honest jobs go
    on."""
    gateway = open_log(guarded_kafka.url("gateway"), "gateway")
    placer = open_log(guarded_kafka.url("placer"), "placer")
    node = open_log(guarded_kafka.url("node-reporter"), "node-reporter")
    ledger, jobs = Partition(Topic.LEDGER, 0), Partition(Topic.JOBS, 0)
    estimates = Partition(Topic.ESTIMATES, 0)
    try:
        for log in (gateway, placer, node):
            await log.start()
        await placer.create({Topic.LEDGER: 1})  # exists: needs no right to create
        before = await placer.end_offsets([ledger])
        with pytest.raises(NotAllowed):
            await gateway.append([Message(ledger, b"forged")])
        outcomes = await asyncio.gather(
            gateway.append([Message(jobs, b"{}")]),
            gateway.append([Message(ledger, b"forged")]),
            gateway.append([Message(estimates, b"{}")]),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], NotAllowed)
        assert isinstance(outcomes[0], list)
        assert isinstance(outcomes[2], list)
        with pytest.raises(AppendFailed, match="in part"):
            await gateway.append([Message(jobs, b"{}"), Message(ledger, b"forged")])
        assert await placer.end_offsets([ledger]) == before
        assert await placer.append([Message(ledger, b"{}")]) == [before[ledger]]
        reader = node.reader({ledger: 0})
        with pytest.raises(NotAllowed):
            await reader.read()
    finally:
        for log in (gateway, placer, node):
            await log.close()
