"""Each workaround for aiokafka fails here once aiokafka no longer needs it; then it is to be removed."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer import fetcher
from aiokafka.protocol import admin as admin_protocol
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from penstock.log.kafka import aiokafka_gaps


def batch_with_header(name: bytes) -> bytes:
    """One record batch whose only header has this name (4 bytes long). The builder takes text only."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=0,
        batch_size=1_000,
    )
    builder.append(0, timestamp=1, key=None, value=b"v", headers=[("name", b"x")])
    return bytes(builder.build()).replace(b"name", name)


def header_of(records: object) -> str:
    record = next(iter(records.next_batch()))  # type: ignore[attr-defined]
    name: str = record.headers[0][0]
    return name


def test_aiokafka_still_raises_at_header_names_that_are_not_utf8() -> None:
    """A foreign client's record stops every reader of the partition: hence `accept_any_header_name`."""
    assert header_of(MemoryRecords(batch_with_header(b"text"))) == "text"
    with pytest.raises(UnicodeDecodeError):
        header_of(MemoryRecords(batch_with_header(b"caf\xe9")))
    assert header_of(aiokafka_gaps._LenientRecords(batch_with_header(b"caf\xe9"))) == "caf\ufffd"


def test_aiokafka_still_has_no_public_call_for_acls() -> None:
    """aio-libs/aiokafka#955: hence `create_topic_acl`."""
    assert not [name for name in dir(AIOKafkaAdminClient) if "acl" in name.lower()]


def test_a_consumer_still_reads_on_in_a_topic_that_was_created_anew() -> None:
    """An unknown topic is no more to it than a new leader: hence `watch_for_deletion`."""
    handling = inspect.getsource(fetcher.Fetcher._proc_fetch_request).partition(
        "UnknownTopicOrPartitionError"
    )[2]
    assert "_set_error" not in handling.partition("elif")[0]


def test_a_consumer_still_cannot_change_how_long_the_broker_gathers() -> None:
    """Hence `set_fetch_wait`."""
    public = [name for name in dir(AIOKafkaConsumer) if not name.startswith("_")]
    assert not [name for name in public if "fetch" in name or "min_bytes" in name or "max_wait" in name]


@pytest.mark.parametrize("client", [AIOKafkaAdminClient, AIOKafkaConsumer, AIOKafkaProducer])
def test_no_client_can_still_be_told_not_to_create_topics(client: type) -> None:
    """Hence `never_create_topics`."""
    options = [*inspect.signature(client.__init__).parameters, *inspect.signature(MetadataRequest).parameters]
    assert [name for name in options if "auto_topic" in name or "create_topic" in name] == [
        "allow_auto_topic_creation"  # the request's
    ]


def test_aiokafka_still_changes_settings_only_by_replacing_them_all() -> None:
    """Hence `alter_topic_configs`."""
    assert not [name for name in dir(admin_protocol) if name.startswith("IncrementalAlterConfigs")]


async def _cancelled_while_closing(close: Callable[[Awaitable[None]], Awaitable[None]]) -> bool:
    """Whether a task that is cancelled while it closes a client learns of it. The client's own task does not
    end at once."""
    ending = asyncio.Event()

    async def synchronise() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.Event().wait()

    client = AIOKafkaClient()
    client._sync_task = asyncio.create_task(synchronise())
    await asyncio.sleep(0)

    async def owner() -> None:
        await close(client.close())

    closing = asyncio.create_task(owner())
    await ending.wait()
    closing.cancel()
    await asyncio.wait({closing})
    return closing.cancelled()


async def test_aiokafka_still_loses_a_cancellation_while_it_closes() -> None:
    """aio-libs/aiokafka#983: hence the check in `within_bound`. A projector went on reading after SIGTERM."""

    async def alone(work: Awaitable[None]) -> None:
        await work

    assert not await _cancelled_while_closing(alone)
    assert await _cancelled_while_closing(aiokafka_gaps.within_bound)
