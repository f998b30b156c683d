"""Validation that reports every mistake at once: a pydantic model derived from a struct.

Decoding with msgspec is fast and stops at the first mistake. Users and programs need all of them, each with
its field, and numbers in strings read as numbers. So each struct has a form: a pydantic model with the same
fields, constraints and rules, made when it is first needed. It refuses unknown fields unless asked otherwise,
and its result is the struct.
"""

import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails

from penstock.model.jobs.job_fields import plain
from penstock.model.nouns.types import Value

V = TypeVar("V", bound=Value)
Unknown = Literal["forbid", "ignore"]

CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def checked(kind: type[V], fields: Mapping[str, Any], unknown: Unknown = "forbid") -> V:
    """The value with these fields, nested values as mappings. Raises pydantic's ValidationError."""
    return _adapter(kind).validate_python(fields, extra=unknown)  # type: ignore[no-any-return]


def checked_json(kind: type[V], body: bytes | str, unknown: Unknown = "forbid", *, strict: bool = False) -> V:
    """The value that this JSON object describes. Raises pydantic's ValidationError.

    `strict`: as in its JSON Schema, so neither `"8"` nor `true` is a number, and `1.0` is a whole one.
    """
    try:
        return _adapter(kind).validate_json(body, extra=unknown, strict=strict)  # type: ignore[no-any-return]
    except ValidationError as error:
        if not strict or not any(map(_is_whole, error.errors(include_url=False))):
            raise
    text = json.dumps(json.loads(body, parse_float=_number))
    return _adapter(kind).validate_json(text, extra=unknown, strict=True)  # type: ignore[no-any-return]


def _is_whole(problem: ErrorDetails) -> bool:
    given = problem["input"]
    return problem["type"] == "int_type" and isinstance(given, float) and given.is_integer()


def _number(text: str) -> int | float:
    found = float(text)
    return int(found) if found.is_integer() else found


def describe(error: ValidationError) -> str:
    """All problems of a validation, each with its field: `spec.command: …; spec.workers: …`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'event'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    )[:1_024]


class Form(BaseModel):
    """Base of the derived models."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, from_attributes=True)


@cache
def form(kind: type[Value]) -> type[Form]:
    """The struct's pydantic model: its fields in order, with their constraints, rules and defaults."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        hint = _form_of(plain(field.type))
        if field.name in kind.RULES:
            hint = Annotated[hint, AfterValidator(_keeping(kind.RULES[field.name]))]
        if field.default is not msgspec.NODEFAULT:
            fields[field.name] = (hint, field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            fields[field.name] = (hint, Field(default_factory=field.default_factory))
        else:
            fields[field.name] = (hint, ...)
    model = create_model(kind.__name__, __base__=Form, __doc__=kind.__doc__, **fields)
    STRUCT_OF[model] = kind
    return model


STRUCT_OF: dict[type[Form], type[Value]] = {}
"""Derived model → its struct."""


@cache
def _adapter(kind: type[Value]) -> TypeAdapter[Any]:
    return TypeAdapter(_form_of(kind))


def _form_of(hint: Any) -> Any:
    return hint_of(hint, lambda kind: Annotated[form(kind), AfterValidator(_made(kind))])


def hint_of(hint: Any, model: Callable[[type[Value]], Any], *, lists: bool = False) -> Any:
    """A struct's type hint as pydantic reads it. `model`: of a nested struct. `lists`: for tuples."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Value):
        return model(hint)
    if origin not in (Annotated, Union, types.UnionType, tuple, dict):
        return hint
    inner = [arg if arg is Ellipsis else hint_of(arg, model, lists=lists) for arg in args]
    if origin is Annotated:
        return Annotated[inner[0], *(constraint(mark) for mark in args[1:])]
    if origin is tuple and lists:
        return list[inner[0]]  # type: ignore[valid-type]
    if origin in (tuple, dict):
        return origin[tuple(inner)]
    return Union[tuple(inner)]  # noqa: UP007 - at run time


def constraint(meta: msgspec.Meta) -> Any:
    """The same constraint for pydantic. JSON Schema and pydantic write `$` where Python, whose `$` allows a
    line feed behind, writes `\\Z`."""
    found = {name: getattr(meta, name) for name in CONSTRAINTS if getattr(meta, name) is not None}
    if meta.pattern is not None:
        found["pattern"] = meta.pattern.replace(r"\Z", "$")
    return Field(**found)


def _made(kind: type[Value]) -> Callable[[Any], Value]:
    names = kind.__struct_fields__
    return lambda given: kind(**{name: getattr(given, name) for name in names})


def _keeping(rule: Callable[[Any], None]) -> Callable[[Any], Any]:
    """The rule as pydantic calls it: it returns the value that it has checked."""

    def validate(value: Any) -> Any:
        rule(value)
        return value

    return validate
