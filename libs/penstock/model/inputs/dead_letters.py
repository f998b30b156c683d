"""Dead letters: records that could not be read or applied."""

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.model.inputs.differences import StateDiffers
from penstock.model.nouns.types import Identifier, ShortText
from penstock.model.schema.event import Event, event
from penstock.model.schema.outline import MAX_OUTLINE_CHARS
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic


@event
class DeadLettered(Event, frozen=True, kw_only=True):
    """A record that could not be read or applied, with the reason. The record itself remains whole in its
    topic."""

    TYPE = "penstock.record.dead_lettered"
    VERSION = 2
    TOPIC = Topic.DEAD_LETTERS
    MAX_BYTES = 5 * MAX_EVENT_BYTES  # the outline and 32 headers, of which every character may be escaped

    source_topic: ShortText
    source_partition: Annotated[int, Meta(ge=0)]
    source_offset: Annotated[int, Meta(ge=0)]
    service: Identifier
    reason: Literal[
        "undecodable",
        "unknown_type",
        "unknown_version",
        "invalid",
        "too_large",
        "wrong_topic",
        "failed",
        "forged",
    ]
    detail: ShortText
    headers: dict[str, str] = field(default_factory=dict)
    """The event's attributes; of other headers only the length."""
    size_bytes: Annotated[int, Meta(ge=0)]
    """Size of the record's value."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Digest of the record's value."""
    outline: Annotated[str, Meta(max_length=MAX_OUTLINE_CHARS)]
    """The value's names, kinds and lengths as JSON, without its texts and numbers: they may be secrets."""
    differs: StateDiffers | None = None
    """Of a record of the ledger: `service` has another state than this record states; None: the letter is
    about something else."""

    def subject(self) -> str:
        return f"{self.source_topic}/{self.source_partition}/{self.source_offset}"
