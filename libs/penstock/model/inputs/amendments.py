"""Amendments of the ledger: what its readers take in place of a record that they cannot decode."""

from typing import Annotated

from msgspec import Meta

from penstock.model.inputs.external_events import Operator
from penstock.model.nouns.types import Milliseconds, ShortText, Value
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic

MAX_RECORD_CHARS = 1_000_000
MAX_RECORD_FACTS = 100_000  # a record of 1 MB has fewer


class AmendedFact(Value, frozen=True, kw_only=True):
    """What readers take in place of one fact of the record."""

    OMITTED = ("data",)

    n: Annotated[int, Meta(ge=0, lt=MAX_RECORD_FACTS)]
    """Its place among the record's facts."""
    data: Annotated[str, Meta(max_length=MAX_RECORD_CHARS)] | None = None
    """The fact's JSON; None: it is left out."""


@event
class LedgerAmended(Event, frozen=True, kw_only=True):
    """An operator amends a ledger record that cannot be decoded. The record itself stays as it was written,
    and so does its id."""

    TYPE = "penstock.ledger.amended"
    TOPIC = Topic.AMENDMENTS
    MAX_BYTES = 15 * MAX_EVENT_BYTES  # the largest record of the log

    offset: Annotated[int, Meta(ge=0)]
    """The record's, in the ledger's partition."""
    seq: Annotated[int, Meta(ge=1)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Digest of the record's bytes: the amendment is of no other record."""
    facts: Annotated[tuple[AmendedFact, ...], Meta(min_length=1, max_length=MAX_RECORD_FACTS)]
    """Those that change; the others stay."""
    by: Operator
    reason: ShortText
    at_ms: Milliseconds

    def subject(self) -> str:
        return f"{Topic.LEDGER}/{self.offset}"
