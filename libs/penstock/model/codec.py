"""One `encode` and two decodes: `decode` for every door, `decode_trusted` for the ledger's hot readers.

`decode` validates with pydantic, ignores unknown fields (style 5) and upcasts old versions.
`decode_trusted` reads bytes that our own `encode` wrote and a validated ledger holds, into msgspec
structs derived from the very same models: same attributes, no validation, five times faster. Code is
typed against the models; nothing may depend on `isinstance` of an event.
"""

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec
import orjson
from pydantic import BaseModel, ValidationError

from penstock.model import external_events, ledger_events
from penstock.model.errors import Invalid, TooBig, UnknownType, UnknownVersion
from penstock.model.event import REGISTRY, Event, wire_type
from penstock.model.topics import MAX_EVENT_BYTES
from penstock.model.upcasters import UPCASTERS

MAX_SHOWN = 128  # characters of a foreign type name in a message

ROOMS = (external_events, ledger_events)  # importing them fills the registry


def encode(event: Event) -> bytes:
    """The event's JSON value: UTF-8, fields in model order, so equal events give equal bytes."""
    try:
        return orjson.dumps(event, default=written)
    except orjson.JSONEncodeError:
        if not isinstance(event, BaseModel):
            raise
        # An integer beyond 64 bits: the model's own serializer can write it.
        return event.__pydantic_serializer__.to_json(event)


def written(value: object) -> dict[str, Any]:
    """The fields of a model as they are written; `orjson.dumps` asks so for every model inside a value.

    Same bytes as the model's own serializer gives, in a third of its time. Raises TypeError for anything else.
    """
    left_out = _LEFT_OUT.get(type(value))
    if left_out is None:
        left_out = _LEFT_OUT[type(value)] = _left_out(type(value))
    if not left_out:
        return value.__dict__
    fields = dict(value.__dict__)
    for name, is_default in left_out:
        if is_default(fields[name]):
            del fields[name]
    return fields


_LEFT_OUT: dict[type, tuple[tuple[str, Callable[[Any], bool]], ...]] = {}


def _left_out(model: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    """The fields that are not written while they have the value for which the model says so."""
    if not issubclass(model, BaseModel):
        raise TypeError(f"{model.__name__} has no JSON form")
    return tuple(
        (name, info.exclude_if) for name, info in model.model_fields.items() if info.exclude_if is not None
    )


def describe(error: ValidationError) -> str:
    """All problems of a validation, each with its field: `spec.command: …; spec.workers: …`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'event'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    )[:1_024]


def decode(type_name: str, value: bytes) -> Event:
    """Reads one event of wire type `penstock.….vN`.

    Raises `TooBig`, `UnknownType`, `UnknownVersion`, or `Invalid` with every bad field named.
    """
    model = REGISTRY.get(type_name)
    most_bytes = MAX_EVENT_BYTES if model is None else model.MAX_BYTES
    if len(value) > most_bytes:
        raise TooBig(f"{len(value)} bytes exceed {most_bytes}")
    if model is None:
        type_name, value = _upcast(type_name, value)
        model = REGISTRY[type_name]
    try:
        return model.model_validate_json(value, extra="ignore")
    except ValidationError as error:
        raise Invalid(describe(error)) from error


def _old_version(type_name: str) -> tuple[str, int]:
    """Type and version of a name that upcasters reach. Raises `UnknownType` or `UnknownVersion`."""
    base, _, version = type_name.rpartition(".v")
    current = [wire_type(model) for model in REGISTRY.values() if model.TYPE == base]
    if not current:
        raise UnknownType(f"{type_name[:MAX_SHOWN]!r} is no event of this version")
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
        # An upcaster may rest on the fields of its version; bytes without them are no event of it.
        raise Invalid(f"event: fits not version {number} of {base}: {error!r}"[:1_024]) from error
    return f"{base}.v{number}", msgspec.json.encode(data)


Decoder = Callable[[bytes | msgspec.Raw], Event]


@cache
def trusted_decoder(type_name: str) -> Decoder:
    """The fast decoder of one current type. Raises `UnknownType`/`UnknownVersion` for any other."""
    model = REGISTRY.get(type_name)
    if model is None:
        _old_version(type_name)
        return lambda value: decode(type_name, bytes(value))
    return cast(Decoder, msgspec.json.Decoder(_struct(model)).decode)


def decode_trusted(type_name: str, value: bytes | msgspec.Raw) -> Event:
    """Reads an event that a validated ledger holds; see the module's docstring."""
    return trusted_decoder(type_name)(value)


def trusted_struct(model: type[BaseModel]) -> type[msgspec.Struct]:
    """The struct that `decode_trusted` makes for this model (for snapshots, which nest nouns)."""
    return _struct(model)


@cache
def _struct(model: type[BaseModel]) -> type[msgspec.Struct]:
    """A frozen struct with the model's fields and, for events, its class attributes and methods."""
    fields: list[Any] = []
    for name, info in model.model_fields.items():
        kind = _plain(info.annotation)
        if info.is_required():
            fields.append((name, kind))
        elif info.default_factory is not None:
            fields.append(
                (name, kind, msgspec.field(default_factory=cast(Callable[[], Any], info.default_factory)))
            )
        else:
            fields.append((name, kind, _default(info.default)))
    fields.sort(key=len)  # required ones first; JSON does not care
    namespace: dict[str, Any] = {}
    if issubclass(model, Event):
        namespace = {
            "TYPE": getattr(model, "TYPE", ""),
            "VERSION": model.VERSION,
            "TOPIC": model.TOPIC,
            "subject": model.subject,
        }
    return msgspec.defstruct(model.__name__, fields, frozen=True, gc=False, kw_only=True, namespace=namespace)


def _default(value: Any) -> Any:
    """A model's default as the derived struct would decode it."""
    if isinstance(value, BaseModel):
        return msgspec.json.decode(value.model_dump_json(), type=_struct(type(value)))
    return value


def _plain(annotation: Any) -> Any:
    """The annotation without constraints and with models replaced by their structs."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain(get_args(annotation)[0])
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        members = [_plain(arg) for arg in get_args(annotation)]
        structs = [m for m in members if isinstance(m, type) and issubclass(m, msgspec.Struct)]
        return Any if len(structs) > 1 else Union[tuple(members)]  # noqa: UP007 - built at run time
    if origin is tuple:
        args = [_plain(arg) for arg in get_args(annotation) if arg is not Ellipsis]
        return tuple[args[0], ...]  # type: ignore[valid-type]
    if origin in (dict, Mapping):
        key, value = get_args(annotation)
        return dict[_plain(key), _plain(value)]  # type: ignore[misc]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _struct(annotation)
    return annotation
