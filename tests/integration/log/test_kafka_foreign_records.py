"""Records that other clients may write to our topics, and that Kafka allows."""

from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from penstock.log.kafka import aiokafka_gaps
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.port import Headers, Message, Partition, Record
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.wire.envelope import Envelope, from_wire, to_wire

pytestmark = pytest.mark.kafka


async def test_values_and_headers_may_be_null(kafka_bootstrap: str, topic_name: Callable[[str], str]) -> None:
    """A tool in another language writes a tombstone, and a header without a value: a service that took them
    for bytes would fall over them again after every restart."""
    topic = topic_name("jobs")
    log = await KafkaLog(kafka_bootstrap, "test").start()
    await log.create({topic: 1})
    headers, value = to_wire(Envelope("c-1", "/test", 1, JobCancelRequested(job_id="job-1")))
    async with AIOKafkaProducer(bootstrap_servers=kafka_bootstrap) as producer:
        await producer.send_and_wait(topic, None, key=b"k", partition=0)
        await producer.send_and_wait(topic, value, partition=0, headers=[*headers, ("traceparent", None)])
    reader = log.reader({Partition(topic, 0): 0})
    records = []
    while len(records) < 2:
        records += await reader.read()
    await reader.close()
    await log.close()
    tombstone, cancel = records
    assert (tombstone.value, tombstone.headers) == (b"", ())
    assert cancel.headers == (*headers, ("traceparent", b""))
    assert from_wire(cancel.headers, cancel.value).data == JobCancelRequested(job_id="job-1")


class BadName(str):
    """A header name as a client in C might send it."""

    __slots__ = ()

    def encode(self, *_: object, **__: object) -> bytes:
        return b"caf\xe9"


async def write_bad_name(bootstrap: str, topic: str, value: bytes, headers: Headers) -> None:
    """One record with a header whose name is Latin-1: no client library writes it willingly."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        batch = producer.create_batch()
        batch._builder = _DefaultRecordBatchBuilderPy(
            magic=2,
            compression_type=0,
            is_transactional=0,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=1 << 16,
        )
        batch.append(timestamp=1, key=None, value=value, headers=[*headers, (BadName("name"), b"x")])
        await (await producer.send_batch(batch, topic, partition=0))


async def test_a_header_name_that_is_not_utf8_stops_nobody(
    kafka_bootstrap: str, topic_name: Callable[[str], str]
) -> None:
    """The broker stores it, and a strict client raises at it, again after every restart: one record would end
    the cell. It is read like any other, and so is what comes before and after."""
    topic = topic_name("jobs")
    log = await KafkaLog(kafka_bootstrap, "test").start()
    await log.create({topic: 1})
    partition = Partition(topic, 0)
    headers, value = to_wire(Envelope("c-1", "/test", 1, JobCancelRequested(job_id="job-1")))
    readers = [log.reader({partition: start}) for start in (0, 1)]
    await log.append([Message(partition, b"before")])
    await write_bad_name(kafka_bootstrap, topic, value, headers)
    await log.append([Message(partition, b"after", headers)] * 3)
    for reader, missed in zip(readers, (0, 1), strict=True):
        found: list[Record] = []
        while len(found) < 5 - missed:
            found += await reader.read()
        assert [record.offset for record in found] == list(range(missed, 5))
        bad = found[1 - missed]
        assert bad.headers == (*headers, ("caf\ufffd", b"x"))
        assert from_wire(bad.headers, bad.value).data == JobCancelRequested(job_id="job-1")
        assert found[-1].headers == headers
    assert aiokafka_gaps._lenient == set(), "and decoding is fast again"
    await log.close()
