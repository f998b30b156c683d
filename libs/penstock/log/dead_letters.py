"""Dead-letter topic: a record that cannot be read or applied, with its place, the reason and an outline;
never dropped.

The record itself stays at its place, where only readers of its topic get it: an unreadable record may hold a
secret.
"""

from hashlib import sha256

from penstock.clock import wall_ms
from penstock.log.port import Message, Partition, Record
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.inputs.differences import StateDiffers
from penstock.model.schema.errors import Reason
from penstock.model.schema.outline import outline, outline_of_header
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire

MAX_HEADERS = 32
MAX_HEADER_CHARS = 512


def dead_letter(
    record: Record, service: str, reason: Reason, detail: str, differs: StateDiffers | None = None
) -> Message:
    """The message to append for a record that `service` could not use. Its id derives from the record's
    place."""
    place = record.partition
    data = DeadLettered(
        source_topic=place.topic,
        source_partition=place.index,
        source_offset=record.offset,
        service=service,
        reason=reason,
        detail=detail[:1_024],
        headers={
            name[:MAX_HEADER_CHARS]: outline_of_header(name, raw.decode(errors="replace"))[:MAX_HEADER_CHARS]
            for name, raw in record.headers[:MAX_HEADERS]
        },
        size_bytes=len(record.value),
        sha256=sha256(record.value).hexdigest(),
        outline=outline(record.value),
        differs=differs,
    )
    event_id = f"dead-{service}-{place.topic}-{place.index}-{record.offset}"
    headers, value = to_wire(
        Envelope(id=event_id, source=f"/penstock/{service}", time_ms=wall_ms(), data=data)
    )
    return Message(Partition(Topic.DEAD_LETTERS, 0), value, headers)
