"""Each workaround for aiokafka fails here once aiokafka no longer needs it; then it is to be removed."""

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from penstock.log import aiokafka_gaps


def batch_with_header(name: bytes) -> bytes:
    """One record batch whose only header has this name (4 bytes long). The builder takes text only."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=0,
        batch_size=1_000,
    )  # fmt: skip
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


def test_a_consumer_still_cannot_change_how_long_the_broker_gathers() -> None:
    """Hence `set_fetch_wait`."""
    public = [name for name in dir(AIOKafkaConsumer) if not name.startswith("_")]
    assert not [name for name in public if "fetch" in name or "min_bytes" in name or "max_wait" in name]
