"""JSON codec of events: `encode` and `decode`, checked by msgspec at C speed.

`decode` ignores unknown fields (style 5) and upcasts old versions. Input that msgspec refuses is validated
again by the struct's form, which names every bad field and reads numbers in strings.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec
import orjson
from msgspec.structs import asdict
from pydantic import ValidationError

from penstock.model import proposals
from penstock.model.decisions import ledger_events, orders
from penstock.model.inputs import amendments, dead_letters, estimates, external_events, followers
from penstock.model.nouns.types import Value
from penstock.model.schema.errors import Invalid, TooBig, UnknownType, UnknownVersion
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.topics import MAX_EVENT_BYTES
from penstock.model.schema.validation import checked_json, describe
from penstock.model.wire.upcasters import FOLDED, SPLIT, UPCASTERS, Upcaster

E = TypeVar("E", bound=Value)

MAX_SHOWN = 128  # characters of a foreign type name in a message

CATALOGUE = (
    external_events,
    dead_letters,
    followers,
    estimates,
    proposals,
    ledger_events,
    orders,
    amendments,
)
"""Importing them fills the registry."""


def encode(value: Value) -> bytes:
    """The value's JSON: UTF-8, fields in the struct's order, so equal values give equal bytes."""
    try:
        return orjson.dumps(value, default=written)
    except orjson.JSONEncodeError:  # an integer beyond 64 bits, which orjson cannot write
        return msgspec.json.encode(_tree(value))


def written(value: object) -> dict[str, Any]:
    """The fields of a struct as they are written; `orjson.dumps` calls this for every struct inside a value.

    Raises TypeError for anything else.
    """
    omitted = _omitted(type(value))  # type: ignore[arg-type]
    fields = asdict(value)  # type: ignore[arg-type]
    if omitted:
        for name, default in omitted:
            if fields[name] == default:
                del fields[name]
    return fields


@cache
def _omitted(kind: type) -> tuple[tuple[str, Any], ...]:
    """The fields that are omitted while they have their default, each with that default."""
    if not issubclass(kind, Value):
        raise TypeError(f"{kind.__name__} has no JSON form")
    fields = msgspec.structs.fields(kind)
    defaults = {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in fields
    }
    omitted = [name for name in defaults if name not in kind.ALWAYS] if kind.ALWAYS else kind.OMITTED
    return tuple((name, defaults[name]) for name in omitted)


def as_written(value: Value) -> dict[str, Any]:
    """The value as plain data: its JSON, parsed into mappings and lists."""
    return orjson.loads(encode(value))  # type: ignore[no-any-return]


def _tree(value: Any) -> Any:
    """The value with mappings in place of structs."""
    if isinstance(value, Value):
        return {name: _tree(inner) for name, inner in written(value).items()}
    return [_tree(entry) for entry in value] if isinstance(value, tuple) else value


def decode(type_name: str, value: bytes) -> Event:
    """Reads one event of wire type `penstock.….vN` from a topic.

    Raises `TooBig`, `UnknownType`, `UnknownVersion`, or `Invalid` with every bad field named.
    """
    model = REGISTRY.get(type_name)
    max_bytes = MAX_EVENT_BYTES if model is None else model.MAX_BYTES
    if len(value) > max_bytes:
        raise TooBig(f"data: {len(value)} bytes exceed {max_bytes}, the bound of {type_name[:MAX_SHOWN]}")
    return decode_fact(type_name, value)


def decode_fact(type_name: str, value: bytes | msgspec.Raw) -> Event:
    """As `decode`, for an event inside a record, which has its own bound."""
    read = _READERS.get(type_name)
    if read is not None:
        try:
            return read(value)  # type: ignore[no-any-return]
        except _UNREADABLE:
            pass  # validated below, with messages
    model = REGISTRY.get(type_name)
    if model is None:
        type_name, value = _upcast(type_name, bytes(value))
        model = REGISTRY[type_name]
    if (fold := FOLDED.get(type_name)) is not None:
        return decode_as(model, _folded(fold, bytes(value)))
    found = decode_as(model, value)
    split = SPLIT.get(type_name)
    if split is not None:
        return split(found)
    if (reader := _decoder(model)) is not None:
        _READERS[type_name] = reader
    return found


def prove_readable(event: Event) -> None:
    """Writers call this before an event counts: one that readers refuse would stop them all at one record.

    Raises `Invalid`, which names the type and every bad field.
    """
    kind = wire_type(type(event))
    try:
        decode_fact(kind, encode(event))
    except Invalid as error:
        raise Invalid(f"{kind} cannot be read back: {error}") from error


_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_READERS: dict[str, Callable[[bytes | msgspec.Raw], Any]] = {}
"""Wire type → decoder, cached for registered types at the first read: the first step of every fold."""


def decode_as(model: type[E], value: bytes | msgspec.Raw) -> E:
    """Reads one value of this class; unknown fields are ignored. Raises `Invalid` with every bad field
    named."""
    read = _decoder(model)
    try:
        if read is not None:
            return read(value)  # type: ignore[no-any-return]
    except _UNREADABLE:
        pass  # validated below, with messages
    try:
        return checked_json(model, bytes(value), unknown="ignore")
    except ValidationError as error:
        raise Invalid(describe(error)) from error


@cache
def _decoder(model: type[Value]) -> Callable[[bytes | msgspec.Raw], Any] | None:
    """None for a struct that msgspec cannot decode: the causes of a `LedgerRecord` differ by their fields
    only."""
    try:
        return msgspec.json.Decoder(model).decode
    except TypeError:
        return None


def _folded(fold: Upcaster, value: bytes) -> bytes:
    """The event's JSON without `FORMER` fields. What is not an event stays as it is: it is refused with
    messages."""
    try:
        return msgspec.json.encode(fold(msgspec.json.decode(value, type=dict[str, Any])))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, LookupError, TypeError, ValueError):
        return value


def _old_version(type_name: str) -> tuple[str, int]:
    """Type and version of a name that upcasters reach. Raises `UnknownType` or `UnknownVersion`."""
    base, _, version = type_name.rpartition(".v")
    current = [wire_type(model) for model in REGISTRY.values() if model.TYPE == base]
    if not current:
        raise UnknownType(f"{type_name[:MAX_SHOWN]!r} is not an event of this version")
    for known, number in UPCASTERS:
        if (known, str(number)) == (base, version):
            return base, number
    raise UnknownVersion(f"{type_name[:MAX_SHOWN]!r} cannot be read; this version writes {current[0]}")


def _upcast(type_name: str, value: bytes) -> tuple[str, bytes]:
    """Applies upcasters until the type is a current one."""
    base, number = _old_version(type_name)
    try:
        data = msgspec.json.decode(value, type=dict[str, Any])
        while (base, number) in UPCASTERS:
            data = UPCASTERS[base, number](data)
            number += 1
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"event: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # An upcaster may rely on the fields of its version; bytes without them are not an event of it.
        raise Invalid(f"event: does not fit version {number} of {base}: {type(error).__name__}") from error
    return f"{base}.v{number}", msgspec.json.encode(data)
