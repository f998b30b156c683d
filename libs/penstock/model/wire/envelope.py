"""CloudEvents 1.0 in Kafka's binary mode: attributes in `ce_*` headers, the event as JSON value.

Attributes beside the specification's: `traceparent` (W3C Trace Context), `causationid` (id of the event
that led to this one) and `correlationid` (the job, so that everything about it can be found).
"""

from datetime import UTC, datetime, timedelta
from functools import lru_cache

import msgspec

from penstock.model.schema.errors import Invalid, Undecodable
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import decode, encode
from penstock.model.wire.nearest import tolerated

Headers = tuple[tuple[str, bytes], ...]

MAX_ID_BYTES = 256
FIXED_HEADERS: Headers = (("ce_specversion", b"1.0"), ("content-type", b"application/json"))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Envelope(msgspec.Struct, frozen=True):
    """One event with its context. `id` is unique per source; a resent event has the same one."""

    id: str
    source: str
    time_ms: int
    data: Event
    traceparent: str | None = None
    causation_id: str | None = None
    correlation_id: str | None = None

    @property
    def type(self) -> str:
        """Wire type, as `penstock.job.submitted.v1`."""
        return f"{self.data.TYPE}.v{self.data.VERSION}"


@lru_cache(maxsize=64)  # few distinct times in a batch of records
def rfc3339(time_ms: int) -> str:
    """`time_ms` since the epoch as CloudEvents writes it, in UTC with milliseconds."""
    return (
        datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def headers(
    event_id: str,
    source: str,
    type_name: str,
    subject: str,
    time_ms: int,
    traceparent: str | None = None,
    causation_id: str | None = None,
    correlation_id: str | None = None,
) -> Headers:
    """The headers of binary mode. Optional attributes are left out when None."""
    pairs = [
        *FIXED_HEADERS,
        ("ce_id", event_id.encode()),
        ("ce_source", source.encode()),
        ("ce_type", type_name.encode()),
        ("ce_subject", subject.encode()),
        ("ce_time", rfc3339(time_ms).encode()),
    ]
    if traceparent is not None:
        pairs.append(("traceparent", traceparent.encode()))
    if causation_id is not None:
        pairs.append(("causationid", causation_id.encode()))
    if correlation_id is not None:
        pairs.append(("correlationid", correlation_id.encode()))
    return tuple(pairs)


def to_wire(envelope: Envelope) -> tuple[Headers, bytes]:
    """Headers and value of one record."""
    found = headers(
        envelope.id,
        envelope.source,
        envelope.type,
        envelope.data.subject(),
        envelope.time_ms,
        envelope.traceparent,
        envelope.causation_id,
        envelope.correlation_id,
    )
    return found, encode(envelope.data)


def from_wire(wire_headers: Headers, value: bytes, topic: str | None = None) -> Envelope:
    """Reads one record. Raises an `EventError` with a `reason` for the dead letter.

    With `topic`, an event that belongs to another topic is `Undecodable`: it must not
    bypass its owner; and a report with values that only a later version knows has the nearest known ones.
    """
    try:
        found = {name: raw.decode() for name, raw in wire_headers}
    except UnicodeDecodeError as error:
        bad = next(name for name, raw in wire_headers if raw == error.object)
        raise Undecodable(f"header {bad!r} is not UTF-8") from error
    if found.get("ce_specversion") != "1.0":
        raise Undecodable("header ce_specversion must be 1.0 (CloudEvents, binary mode)")
    event_id = found.get("ce_id")
    if not event_id or not found.get("ce_source") or not found.get("ce_type"):
        missing = [name for name in ("ce_id", "ce_source", "ce_type") if not found.get(name)]
        raise Undecodable(f"headers missing: {', '.join(missing)}")
    if 4 * len(event_id) > MAX_ID_BYTES and len(event_id.encode()) > MAX_ID_BYTES:
        raise Undecodable(f"ce_id exceeds {MAX_ID_BYTES} bytes")
    try:
        data = decode(found["ce_type"], value)
    except Invalid:
        known = None if topic is None else tolerated(found["ce_type"], value)
        if known is None:
            raise
        data = known
    if topic is not None and data.TOPIC != topic:
        raise Undecodable(f"{found['ce_type']} does not belong on {topic}")
    return Envelope(
        id=event_id,
        source=found["ce_source"],
        time_ms=_time_ms(found.get("ce_time")),
        data=data,
        traceparent=found.get("traceparent"),
        causation_id=found.get("causationid"),
        correlation_id=found.get("correlationid"),
    )


@lru_cache(maxsize=256)
def _time_ms(text: str | None) -> int:
    """CloudEvents' optional time; 0 when absent. Raises `Undecodable`."""
    if text is None:
        return 0
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise Undecodable("ce_time is not RFC 3339") from error
    if time.tzinfo is None:
        raise Undecodable("ce_time has no offset; end it with Z")
    return max(0, (time - EPOCH) // timedelta(milliseconds=1))


SIGNATURE = "signature"
"""Header of a node's event: Ed25519 in base64 over `signed_bytes`."""


def signed_bytes(cell: str, event_id: str, type_name: str, value: bytes) -> bytes:
    """The bytes of an event that a node signs.
    Names contain no NUL, so two events never have the same bytes."""
    return b"\0".join((b"penstock node event", cell.encode(), event_id.encode(), type_name.encode(), value))


def topic_of(event: Event) -> Topic:
    """The topic that this event belongs on. Raises TypeError for events that exist in ledger records only."""
    if event.TOPIC is None:
        raise TypeError(f"{wire_type(type(event))} lives in ledger records only")
    return event.TOPIC
