"""Ledger records and the chain that makes them valid (LAWs 2 and 3).

A record's id is the first 32 hex digits of the sha256 of its bytes, and every record names its parent's
id: readers of one partition agree on which records count, a changed byte breaks the chain, and a zombie's
late record (an old seq, parent or term) is void for every reader.
"""

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import orjson

from penstock import __version__
from penstock.errors import PenstockError
from penstock.model.decisions.ledger_events import PlacementExplanation, TermStarted
from penstock.model.schema.errors import EventError, NeedsNewer, UnknownType, UnknownVersion
from penstock.model.schema.event import Event, UnknownFact, wire_type
from penstock.model.wire.additions import ADDITIONS, is_newer, needed
from penstock.model.wire.codec import decode_fact, encode, written
from penstock.model.wire.nearest import tolerated

NO_PARENT = "0" * 32
TERM_STARTED = f"{TermStarted.TYPE}.v{TermStarted.VERSION}"


class Head(msgspec.Struct, frozen=True, gc=False):
    """The last valid record."""

    seq: int
    id: str
    term: int


GENESIS = Head(0, NO_PARENT, 0)


class RawCause(msgspec.Struct, frozen=True, gc=False):
    """`InputCause`, `TimerCause` or `TermCause`; the fields of the others are None."""

    topic: str | None = None
    partition: int = 0
    offset: int = 0
    event_id: str | None = None
    timer_id: str | None = None
    placer_id: str | None = None


class UndecodableRecord(PenstockError):
    """A valid record with a fact that cannot be decoded: the ledger goes on behind it,
    and its readers cannot."""

    PROBLEM = "cannot be decoded"

    def __init__(self, offset: int, seq: int, kind: str, cause: str, *, remedy: str = "") -> None:
        """`offset`: of the record in the ledger's partition, -1 where it comes from no log. `kind`: wire type
        of the fact; `remedy`: where another version of Penstock wrote it, which this one does not know.
        """
        super().__init__(
            f"the ledger's record at offset {offset} (seq {seq}) {self.PROBLEM}: {kind}: {cause}"
        )
        self.offset = offset
        self.seq = seq
        self.kind = kind
        self.cause = cause
        self.remedy = remedy or f"`penstock repair --at {offset}` amends it"

    def row(self) -> dict[str, object]:
        """For answers."""
        about = {"offset": self.offset, "seq": self.seq, "type": self.kind}
        return {**about, "cause": self.cause, "remedy": self.remedy}


class UnfoldableRecord(UndecodableRecord):
    """A valid record with a fact that can be decoded and that the fold refuses, such as the end of a job that
    never was. The state that met it is half changed: it must be dropped."""

    PROBLEM = "cannot be folded"

    def __init__(self, offset: int, seq: int, kind: str, n: int, cause: str) -> None:
        """`n`: place of the fact among those that were read."""
        super().__init__(offset, seq, kind, cause)
        self.n = n


class Amended(bytes):
    """A record's bytes as they were written, which its id and the chain follow from, and the text that is
    read in place of them."""

    text: bytes

    @classmethod
    def of(cls, value: bytes, text: bytes) -> "Amended":
        found = cls(value)
        found.text = text
        return found


class RawFact(msgspec.Struct, frozen=True, gc=False):
    """A fact not yet decoded; most readers want only some types."""

    type: str
    data: msgspec.Raw
    needs: str = ""
    """Lowest version that may fold it (`penstock.model.wire.additions`);
    empty: every version knows its form."""

    def event(self) -> Event:
        """Raises `EventError`."""
        return self._marked() if self.needs else decode_fact(self.type, self.data)

    def _marked(self) -> Event:
        if is_newer(self.needs):
            raise NeedsNewer(self.needs, __version__)
        try:
            return decode_fact(self.type, self.data)
        except EventError:
            return tolerated(self.type, bytes(self.data)) or UnknownFact()


class RawRecord(msgspec.Struct, frozen=True, gc=False):
    """A record whose facts and explanation are decoded
    on demand. Fields: `penstock.model.decisions.ledger_events.LedgerRecord`."""

    seq: int
    parent: str
    term: int
    now_ms: int
    cause: RawCause
    outcome: str
    reason: str | None
    facts: tuple[RawFact, ...]
    explanation: msgspec.Raw
    amended: msgspec.Raw = msgspec.Raw()
    """Who amended the record and why (`penstock.ledger.record.amendment`);
    empty: it is read as it was written."""
    digest: str = ""
    """Of its placer's state after it (`penstock.ledger.replica.digest`); empty: it states none."""

    def events(self, offset: int) -> list[Event]:
        """Its facts, decoded. `offset`: the record's own. Raises `UndecodableRecord`."""
        return [self.event(fact, offset) for fact in self.facts]

    def event(self, fact: RawFact, offset: int) -> Event:
        """One of its facts, decoded. Raises `UndecodableRecord`."""
        try:
            return fact.event()
        except EventError as error:
            raise UndecodableRecord(offset, self.seq, fact.type, str(error), remedy=_remedy(error)) from error


def _remedy(error: EventError) -> str:
    """Where another version wrote the fact; empty: it is broken."""
    if isinstance(error, NeedsNewer):
        return f"run Penstock {error.version} or later"
    foreign = isinstance(error, UnknownType | UnknownVersion)
    return "run the version of the placer that wrote it" if foreign else ""


_decode = msgspec.json.Decoder(RawRecord).decode


class Unreadable(Exception):
    """Bytes on the ledger's topic that are not a valid record.
    They are void, like any record that breaks the chain."""


def read(value: bytes) -> RawRecord:
    """Reads one record's bytes. Raises `Unreadable`."""
    try:
        return _decode(value.text if isinstance(value, Amended) else value)
    except (msgspec.DecodeError, RecursionError) as error:  # too deep nesting raises no DecodeError
        raise Unreadable(str(error)) from error


def record_id(value: bytes) -> str:
    """The id that the next record must name as its parent."""
    return sha256(value).hexdigest()[:32]


def extend(head: Head, record: RawRecord, value: bytes) -> Head | None:
    """The new head if the record is valid after `head`, else None: it is void (LAW 3)."""
    if record.seq != head.seq + 1 or record.parent != head.id:
        return None
    starts_term = bool(record.facts) and record.facts[0].type == TERM_STARTED
    if record.term != head.term + (1 if starts_term else 0):
        return None
    return Head(record.seq, record_id(value), record.term)


def read_valid(head: Head, value: bytes) -> tuple[Head, RawRecord] | None:
    """Reads and validates in one step: (new head, record), or None for a void record."""
    try:
        record = read(value)
    except Unreadable:
        return None
    extended = extend(head, record, value)
    return None if extended is None else (extended, record)


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A record that a placer is about to write, without the fields that follow from the head."""

    term: int
    now_ms: int
    cause: dict[str, object]
    outcome: str
    reason: str | None
    facts: Sequence[Event]
    explanation: Sequence[PlacementExplanation] = ()
    digest: str = ""
    """As in `RawRecord`."""


def entry(fact: Event) -> dict[str, object]:
    """A fact as it stands in a record."""
    found: dict[str, object] = {"type": wire_type(type(fact)), "data": fact}
    if type(fact) in ADDITIONS and (needs := needed(fact)):
        found["needs"] = needs
    return found


def write(head: Head, draft: Draft) -> tuple[Head, bytes]:
    """The record's bytes and the new head. Equal inputs give equal bytes, in any process."""
    body = {
        "seq": head.seq + 1,
        "parent": head.id,
        "term": draft.term,
        "now_ms": draft.now_ms,
        "cause": draft.cause,
        "outcome": draft.outcome,
        "reason": draft.reason,
        "facts": [entry(fact) for fact in draft.facts],
        "explanation": draft.explanation,
    }
    if draft.digest:
        body["digest"] = draft.digest
    try:
        value = orjson.dumps(body, default=written)
    except orjson.JSONEncodeError:  # an integer beyond 64 bits: `encode` can write it
        body["facts"] = [{**entry(fact), "data": orjson.Fragment(encode(fact))} for fact in draft.facts]
        value = orjson.dumps(body, default=written)
    return Head(head.seq + 1, record_id(value), draft.term), value
