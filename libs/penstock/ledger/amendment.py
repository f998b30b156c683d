"""Amending a record that cannot be decoded, or not be folded: what every reader takes in its place, and what an operator is
offered.

The record stays in the log, and its bytes still give its id: the chain is the same with and without an
amendment.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.ledger.record import Amended, RawRecord, UndecodableRecord, Unreadable, read
from penstock.model.amendments import AmendedFact, LedgerAmended
from penstock.model.codec import decode_fact
from penstock.model.errors import EventError, UnknownType, UnknownVersion
from penstock.model.event import REGISTRY, Event
from penstock.model.validation import checked_json

MAX_ROUNDS = 64  # of bounding one fact: rules may only be checked once all fields are within their bounds

NOTHING: Mapping[int, str] = MappingProxyType({})
CUT = {"string_too_long": "max_length", "too_long": "max_length"}
NEAREST = {
    "less_than_equal": ("le", 0),
    "less_than": ("lt", -1),
    "greater_than_equal": ("ge", 0),
    "greater_than": ("gt", 1),
}
"""Kind of a problem → the constraint that names the bound, and the step from it to a legal whole number."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an amended record says of its amendment."""

    by: str
    reason: str
    at_ms: int
    sha256: str
    facts: tuple[int, ...]
    """Places in the record as it was written."""


class Change(NamedTuple):
    """One field that the amendment changes, or one fact that it leaves out."""

    n: int
    type: str
    field: str
    """As `units.0.expected_ms`; empty: the whole fact."""
    given: Any
    becomes: Any
    problem: str


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
    """The record as readers take it; None: the amendment is of another record, or does not make this one
    decodable."""
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
            facts.append(
                {"type": fact.type, "data": msgspec.Raw(data.encode()) if isinstance(data, str) else data}
            )
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
                    f"{cause}: the record was written by another version. Give every service and gateway the version of "
                    "the placer that wrote it; an amendment would lose what it says"
                ) from error
            found, text = _bounded(n, fact.type, bytes(fact.data))
            left_out = Change(n, fact.type, "", json.loads(bytes(fact.data)), None, error.cause)
            facts.append(AmendedFact(n=n, data=text))
            changes += found if text is not None else [left_out]
    if not facts:
        raise NotAmendable(
            f"the record at offset {offset} (seq {record.seq}) can be read; there is nothing to repair"
        )
    return Proposal(record.seq, digest(value), tuple(facts), tuple(changes))


def _bounded(n: int, kind: str, data: bytes) -> tuple[list[Change], str | None]:
    """The changes of one fact and its new JSON; None: no bound helps."""
    model = REGISTRY.get(kind)
    if model is None:  # an older version: its bounds are not known any more
        return [], None
    fields, changes = json.loads(data), []
    for _ in range(MAX_ROUNDS):
        problems = _problems(model, json.dumps(fields))
        if not problems:
            break
        found = [_nearest(n, kind, fields, problem) for problem in problems]
        if None in found:
            return [], None
        changes += [change for change in found if change is not None]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    try:
        decode_fact(kind, text.encode())
    except EventError:
        return [], None
    return changes, text


def _problems(model: type[Event], text: str) -> list[ErrorDetails]:
    try:
        checked_json(model, text, "ignore")
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _nearest(n: int, kind: str, fields: Any, problem: ErrorDetails) -> Change | None:
    """Puts the nearest legal value into `fields`; None: this kind of problem has no nearest value."""
    *way, last = problem["loc"] or (None,)
    bounds: dict[str, Any] = problem.get("ctx", {})
    try:
        place = _at(fields, way)
        given = place[last]
    except (LookupError, TypeError):
        return None
    if problem["type"] in NEAREST:
        name, step = NEAREST[problem["type"]]
        becomes = bounds[name] + step if isinstance(given, int) else bounds[name]
    elif problem["type"] in CUT:
        becomes = given[: bounds[CUT[problem["type"]]]]
    else:
        return None
    place[last] = becomes
    return Change(n, kind, ".".join(map(str, problem["loc"])), given, becomes, problem["msg"])


def _at(fields: Any, way: Iterable[Any]) -> Any:
    for part in way:
        fields = fields[part]
    return fields
