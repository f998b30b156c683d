"""Amending a record that cannot be decoded, or not be folded: what every reader takes in its place, and what
an operator is offered.

The record stays in the log, and its bytes still give its id: the chain is the same with and without an
amendment.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.ledger.record.record import Amended, RawRecord, UndecodableRecord, Unreadable, read
from penstock.model.inputs.amendments import AmendedFact, LedgerAmended
from penstock.model.schema.errors import UnknownType, UnknownVersion
from penstock.model.wire.nearest import Change, bounded

NOTHING: Mapping[int, str] = MappingProxyType({})


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an amended record says of its amendment."""

    by: str
    reason: str
    at_ms: int
    sha256: str
    facts: tuple[int, ...]
    """Places in the record as it was written."""


class Proposal(NamedTuple):
    """An amendment that makes a record decodable."""

    seq: int
    sha256: str
    facts: tuple[AmendedFact, ...]
    changes: tuple[Change, ...]


class NotAmendable(Exception):
    """The message says why no amendment helps, and what does."""


def digest(value: bytes) -> str:
    """Names the record in its amendment, in 64 hex digits."""
    return sha256(value).hexdigest()


def amend(value: bytes, amendment: LedgerAmended) -> Amended | None:
    """The record as readers take it;
    None: the amendment is of another record, or does not make this one decodable."""
    if digest(value) != amendment.sha256:
        return None
    try:
        record = read(value)
    except Unreadable:
        return None
    found = Amended.of(value, _text(record, amendment))
    try:
        read(found).events(amendment.offset)
    except (Unreadable, UndecodableRecord):
        return None
    return found


def place_as_written(facts: Iterable[AmendedFact], n: int) -> int:
    """Place in the record as it was written of the fact at place `n` of the amended one."""
    for left_out in sorted(fact.n for fact in facts if fact.data is None):
        n += left_out <= n
    return n


def _text(record: RawRecord, amendment: LedgerAmended) -> bytes:
    changed = {fact.n: fact.data for fact in amendment.facts}
    facts = []
    for n, fact in enumerate(record.facts):
        data = changed.get(n, fact.data)
        if data is not None:
            text = msgspec.Raw(data.encode()) if isinstance(data, str) else data
            facts.append({"type": fact.type, "data": text} | ({"needs": fact.needs} if fact.needs else {}))
    note = Note(
        by=amendment.by,
        reason=amendment.reason,
        at_ms=amendment.at_ms,
        sha256=amendment.sha256,
        facts=tuple(changed),
    )
    body = {name: getattr(record, name) for name in RawRecord.__struct_fields__} | {
        "facts": facts,
        "amended": note,
    }
    return msgspec.json.encode(body)


def propose(value: bytes, offset: int, without: Mapping[int, str] = NOTHING) -> Proposal:
    """The smallest amendment: each number or text outside of its bounds becomes the nearest within; a fact
    for which that does not suffice is left out, as are those of `without`: place in the record → why it
    cannot be folded. Raises `NotAmendable`.
    """
    try:
        record = read(value)
    except Unreadable as error:
        raise NotAmendable(
            f"at offset {offset} lies no ledger record ({error}): all readers skip it"
        ) from error
    facts, changes = [], []
    for n, fact in enumerate(record.facts):
        if n in without:
            facts.append(AmendedFact(n=n))
            changes.append(Change(n, fact.type, "", json.loads(bytes(fact.data)), None, without[n]))
            continue
        try:
            record.event(fact, offset)
        except UndecodableRecord as error:
            cause = error.__cause__
            if isinstance(cause, UnknownType | UnknownVersion):
                raise NotAmendable(
                    f"{cause}: the record was written by another version. For every service and gateway: "
                    f"{error.remedy}; an amendment would lose what it says"
                ) from error
            found, text = bounded(n, fact.type, bytes(fact.data))
            left_out = Change(n, fact.type, "", json.loads(bytes(fact.data)), None, error.cause)
            facts.append(AmendedFact(n=n, data=text))
            changes += found if text is not None else [left_out]
    if not facts:
        raise NotAmendable(
            f"the record at offset {offset} (seq {record.seq}) can be read; there is nothing to repair"
        )
    return Proposal(record.seq, digest(value), tuple(facts), tuple(changes))
