"""Records that other clients may write to our topics, and that Kafka allows."""

from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaProducer

from penstock.events.doors import JobCancelRequested
from penstock.events.envelope import Envelope, from_wire, to_wire
from penstock.kernel.kafka_log import KafkaLog
from penstock.kernel.log import Partition

pytestmark = pytest.mark.kafka


async def test_values_and_headers_may_be_null(kafka_bootstrap: str, topic_name: Callable[[str], str]) -> None:
    """A tool in another language writes a tombstone, and a header without a value: a service that took them for
    bytes would fall over them again after every restart."""
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
        records += await reader.read(timeout_ms=5_000)
    await reader.close()
    await log.close()
    tombstone, cancel = records
    assert (tombstone.value, tombstone.headers) == (b"", ())
    assert cancel.headers == (*headers, ("traceparent", b""))
    assert from_wire(cancel.headers, cancel.value).data == JobCancelRequested(job_id="job-1")
