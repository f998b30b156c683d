"""How long each log keeps what: the ledger and what it has to answer for ever, the rest for a bounded
time."""

from collections.abc import Callable

import asyncpg
import pytest

from penstock.errors import OffsetOutOfRange
from penstock.log.kafka import kafka
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.port import Message, Partition
from penstock.log.postgres import embedded
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import DAY_MS, FOR_EVER, RETENTION_MS
from penstock.model.schema.topics import INPUT_TOPICS, NODE_PARTITIONS, Topic

TOPICS = dict.fromkeys(map(str, Topic), 2)
LIMITED = sorted(topic for topic, ms in RETENTION_MS.items() if ms != FOR_EVER)


async def make_older(dsn: str, days: float, *, newest: int = 0) -> None:
    """Lets days go by for all records of each partition but the newest ones."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        """UPDATE penstock_log.records r SET timestamp_ms = timestamp_ms - $1 FROM penstock_log.partitions p
        WHERE p.id = r.partition_id AND r.position < p.head - $2""",
        round(days * DAY_MS),
        newest,
    )
    await connection.close()


async def restarted(dsn: str) -> EmbeddedLog:
    """A log after a start that has found all that expired."""
    log = await EmbeddedLog(dsn, "test").start()
    assert log._expiring is not None
    await log._expiring
    return log


async def filled(dsn: str, count: int) -> dict[str, Partition]:
    """So many records on the first partition of each topic."""
    log = await EmbeddedLog(dsn, "writer").start()
    await log.create(TOPICS)
    places = {topic: Partition(topic, 0) for topic in TOPICS}
    await log.append([Message(place, b"%d" % number) for place in places.values() for number in range(count)])
    await log.close()
    return places


def test_only_what_can_be_had_again_is_ever_deleted() -> None:
    """A placer stands still over a long holiday: its inputs wait for it, and the ledger is the system of
    record."""
    assert not {Topic.LEDGER, *INPUT_TOPICS} & set(LIMITED)
    assert set(RETENTION_MS) == set(Topic)


@pytest.mark.postgres
async def test_expired_records_go_and_nothing_else(dsn: str) -> None:
    """A year on one machine: orders, telemetry and dead letters do not fill the disk, all others are
    there."""
    places = await filled(dsn, 30)
    await make_older(dsn, 365, newest=10)
    log = await restarted(dsn)
    begins = await log.begin_offsets(places.values())
    assert {place.topic: begin for place, begin in begins.items()} == {
        topic: 20 if topic in LIMITED else 0 for topic in TOPICS
    }
    assert set((await log.end_offsets(places.values())).values()) == {30}
    for topic, place in places.items():
        first = begins[place]
        reader = log.reader({place: first})
        assert [record.value for record in await reader.read()] == [b"%d" % n for n in range(first, 30)]
        await reader.close()
        if topic in LIMITED:
            late = log.reader({place: first - 1})
            with pytest.raises(OffsetOutOfRange, match="no longer holds offset 19"):
                await late.read()
            await late.close()
    await log.close()


@pytest.mark.postgres
async def test_a_topic_of_which_nothing_is_left(dsn: str) -> None:
    """A cluster stood still for half a year: offsets go on where they were, and a position from before is
    refused."""
    places = await filled(dsn, 3)
    await make_older(dsn, 180)
    log = await restarted(dsn)
    place = places[Topic.ORDERS]
    assert await log.begin_offsets([place]) == await log.end_offsets([place]) == {place: 3}
    late, tail = log.reader({place: 1}), log.reader({place: 3})
    with pytest.raises(OffsetOutOfRange):
        await late.read()
    assert await log.append([Message(place, b"new")]) == [3]
    assert [record.value for record in await tail.read()] == [b"new"]
    await log.close()


@pytest.mark.postgres
async def test_a_clock_that_was_set_back_deletes_no_younger_record(dsn: str) -> None:
    """The machine's clock was wrong for an hour: what seems expired behind a record that is not stays."""
    places = await filled(dsn, 5)
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE penstock_log.records SET timestamp_ms = 1 WHERE position IN (0, 1, 3)")
    await connection.close()
    log = await restarted(dsn)
    assert (await log.begin_offsets([places[Topic.ORDERS]]))[places[Topic.ORDERS]] == 2
    reader = log.reader({places[Topic.ORDERS]: 2})
    assert [record.offset for record in await reader.read()] == [2, 3, 4]
    await log.close()


@pytest.mark.postgres
async def test_a_running_log_is_bounded(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service is restarted for months: appends themselves have the old records deleted."""
    monkeypatch.setattr(embedded, "EXPIRE_EVERY", 200)
    monkeypatch.setattr(embedded, "EXPIRE_BATCH", 30)
    log = await EmbeddedLog(dsn, "placer").start()
    await log.create({Topic.ORDERS: NODE_PARTITIONS, Topic.LEDGER: 1})
    orders = [Partition(Topic.ORDERS, index) for index in range(NODE_PARTITIONS)]
    ledger = Partition(Topic.LEDGER, 0)
    for _ in range(10):
        await log.append(
            [Message(place, b"order") for place in orders for _ in range(50)] + [Message(ledger, b"record")]
        )
        assert log._expiring is not None
        await log._expiring
        await make_older(dsn, 8)
    connection = await asyncpg.connect(dsn)
    count = await connection.fetchval("SELECT count(*) FROM penstock_log.records")
    await connection.close()
    assert count == 50 * NODE_PARTITIONS + 10, "the last round of orders, and the whole ledger"
    await log.close()


@pytest.mark.kafka
async def test_a_client_whose_clock_is_ahead_may_write(
    kafka_bootstrap: str, topic_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's clock is a year ahead: by default Kafka refuses its reports, and would delete others' by their
    stamps."""
    topic = topic_name("nodes")
    log = await KafkaLog(kafka_bootstrap, "test").start()
    await log.create({topic: 1})
    place, right_ms = Partition(topic, 0), kafka.wall_ms()
    monkeypatch.setattr(kafka, "wall_ms", lambda: right_ms + 365 * DAY_MS)
    assert await log.append([Message(place, b"{}")]) == [0]
    reader = log.reader({place: 0})
    [record] = await reader.read()
    assert abs(record.timestamp_ms - right_ms) < 100 * DAY_MS, "the broker's clock counts"
    await log.close()
