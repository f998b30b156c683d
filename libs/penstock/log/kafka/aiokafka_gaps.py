"""Workarounds for aiokafka 0.14: the only file that touches its private names.

Each function fills one gap in aiokafka's public interface and names it.
`tests/unit/log/test_aiokafka_gaps.py` and `tests/integration/log/test_log_faults.py` fail when aiokafka has
closed the gap; then the function goes.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, overload

import aiokafka.admin.client
import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords, _MemoryRecordsPy

STOP_TIMEOUT_S = 5.0  # closing sockets; a broker that is gone must not block a stop
ACL_TOPIC, ACL_GROUP = 2, 3  # Kafka's ResourceType
ACL_LITERAL, ACL_PREFIXED = 3, 4  # its PatternType
ACL_ALLOW = 3  # its AclPermissionType
ACL_ANY = 1  # the same number in all of them
NO_ERROR, UNKNOWN_TOPIC = 0, 3  # Kafka error codes
V2 = 2  # the first record format with headers
SET = 0  # Kafka's AlterConfigOp


def never_create_topics() -> None:
    """From now on no metadata request of this process creates a topic. Idempotent.

    Gap: Kafka creates a topic that a metadata request names unless the request forbids it; aiokafka's can,
    but no client has an option for it (no issue upstream). Producers and consumers ask again at every change
    of leaders, so that one of them would create a topic that was just deleted.
    """
    asking = partial(MetadataRequest, allow_auto_topic_creation=False)
    aiokafka.client.MetadataRequest = asking
    aiokafka.admin.client.MetadataRequest = asking


async def within_bound(work: Awaitable[Any]) -> None:
    """Awaits the closing of a client for at most `STOP_TIMEOUT_S`; errors of a client that ends are dropped.

    Gap: `stop()` and `close()` suppress a cancellation of their caller together with that of their own tasks
    (aio-libs/aiokafka#983): a service that was stopped while it closed one reader went on with the next.
    """
    caller = asyncio.current_task()
    cancelled = 0 if caller is None else caller.cancelling()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await work
    except (KafkaError, OSError):
        pass
    if caller is not None and caller.cancelling() > cancelled:
        raise asyncio.CancelledError


async def abandon_producer(producer: AIOKafkaProducer) -> None:
    """Closes a producer at once and drops the batches that it still holds.

    Gap: `stop()` waits for the last batches without bound while the broker is away (aio-libs/aiokafka#1101),
    and a producer that is not stopped goes on sending them. A write whose failure was reported must not
    follow later.
    """
    sender = producer._sender
    if sender is not None:
        if sender.sender_task is not None:
            sender.sender_task.cancel()
        await within_bound(producer.client.close())
        producer._message_accumulator.fail_all(KafkaError("the producer was dropped"))
    await within_bound(producer.stop())


async def create_topic_acl(admin: AIOKafkaAdminClient, identity: str, operation: int, topic: str) -> Any:
    """Asks the controller to allow `identity` one operation on one topic; returns Kafka's answer.

    Gap: the admin client has no public call for ACLs (aio-libs/aiokafka#955).
    """
    request = CreateAclsRequest(ACL_TOPIC, topic, ACL_LITERAL, f"User:{identity}", "*", operation, ACL_ALLOW)
    return await admin._send_to_controller(request)


async def create_group_acl(admin: AIOKafkaAdminClient, identity: str, operation: int, prefix: str) -> Any:
    """The same for all consumer groups with this prefix."""
    request = CreateAclsRequest(
        ACL_GROUP, prefix, ACL_PREFIXED, f"User:{identity}", "*", operation, ACL_ALLOW
    )
    return await admin._send_to_controller(request)


async def delete_acls(admin: AIOKafkaAdminClient, identity: str) -> Any:
    """Asks the controller to take away all rights of `identity`; returns Kafka's answer."""
    request = DeleteAclsRequest(ACL_ANY, None, ACL_ANY, f"User:{identity}", None, ACL_ANY, ACL_ANY)
    return await admin._send_to_controller(request)


class _AlterResponse(Response):  # type: ignore[misc]
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    )


class _AlterStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = _AlterResponse
    SCHEMA = Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(("name", String("utf-8")), ("operation", Int8), ("value", String("utf-8"))),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class _AlterRequest(Request[_AlterStruct]):  # type: ignore[misc]
    API_KEY = 44

    def __init__(self, changes: Mapping[str, Mapping[str, str]]) -> None:
        self._changes = changes

    def build(self, request_struct_class: type[_AlterStruct]) -> _AlterStruct:
        resources = [
            (ConfigResourceType.TOPIC, topic, [(name, SET, value) for name, value in configs.items()])
            for topic, configs in self._changes.items()
        ]
        return request_struct_class(resources, False)


async def alter_topic_configs(admin: AIOKafkaAdminClient, changes: Mapping[str, Mapping[str, str]]) -> Any:
    """Asks the controller to change settings: topic → setting → value; returns Kafka's answer.

    Gap: aiokafka has only AlterConfigs, which takes away every other setting that the topic has, and not
    IncrementalAlterConfigs (no issue upstream).
    """
    return await admin._send_to_controller(_AlterRequest(changes))


def set_fetch_wait(consumer: AIOKafkaConsumer, min_bytes: int, max_wait_ms: int) -> None:
    """The consumer's next fetches ask the broker to answer with `min_bytes`, or after `max_wait_ms`.

    Gap: both values are fixed when a consumer is constructed (no issue upstream). A reader needs to change
    them with the load: the broker must gather, since a client that slept would hold back a first record that
    is already there and ask for the next ones only afterwards.
    """
    consumer._fetcher._fetch_min_bytes = min_bytes
    consumer._fetcher._fetch_max_wait_ms = max_wait_ms


def watch_for_deletion(consumer: AIOKafkaConsumer) -> set[str]:
    """The names of topics that this consumer has read from and that a broker no longer knows; it grows while
    the consumer works.

    Gap: a consumer takes UNKNOWN_TOPIC_OR_PARTITION for a change of leaders. In a topic that was deleted and
    created again it reads on at its old position, and skips the records before it (no issue upstream).
    """
    client, known, gone = consumer._client, set(), set()
    send = client.send

    async def observed(node_id: Any, request: Any, **options: Any) -> Any:
        answer = await send(node_id, request, **options)
        if isinstance(request, FetchRequest):
            for topic, partitions in answer.topics:
                for partition, code, *_ in partitions:
                    if code == NO_ERROR:
                        known.add((topic, partition))
                    elif code == UNKNOWN_TOPIC and (topic, partition) in known:
                        gone.add(topic)
        return answer

    client.send = observed
    return gone


# --- header names that are not UTF-8
# -------------------------------------------------------------------------
#
# Gap: Kafka's protocol wants UTF-8 in header names, no broker checks it, and aiokafka's decoder raises
# `UnicodeDecodeError` for every reader of the partition at every try (no issue upstream): one record of a
# foreign
# client would end a cell. A reader that meets such a record asks for lenient decoding until it is past it;
# `read`
# then returns U+FFFD in the name, and the record is handled like any other. The lenient decoder is aiokafka's
# own
# pure-Python one, about ten times slower than the C one, hence the switch.

_lenient: set[int] = set()
"""Ids of the readers whose next record is such a one."""


class _LenientBytes(bytearray):
    """Decodes anything; keys and values are taken as `bytes`, aiokafka decodes header names only."""

    @overload  # type: ignore[override]
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "_LenientBytes": ...
    def __getitem__(self, at: int | slice) -> "int | _LenientBytes":
        found = super().__getitem__(at)
        return found if isinstance(found, int) else _LenientBytes(found)

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]
    def __iter__(self) -> Any:
        found = super().__iter__()
        self._buffer = _LenientBytes(self._buffer)  # type: ignore[has-type]
        return found


class _LenientRecords(_MemoryRecordsPy):  # type: ignore[misc]
    def next_batch(self) -> Any:
        raw = self._next_slice
        batch = super().next_batch()
        return _LenientBatch(raw) if raw is not None and raw[self.MAGIC_OFFSET] >= V2 else batch


def _records(raw: bytes) -> Any:
    return _LenientRecords(raw) if _lenient else MemoryRecords(raw)


def accept_any_header_name(reader: object) -> None:
    """From now on all consumers of this process decode leniently,
    until this reader calls `accept_utf8_only`."""
    fetcher.MemoryRecords = _records
    _lenient.add(id(reader))


def accept_utf8_only(reader: object) -> None:
    """The reader is past the record, or closed. Idempotent."""
    if _lenient:
        _lenient.discard(id(reader))
        if not _lenient:
            fetcher.MemoryRecords = MemoryRecords
