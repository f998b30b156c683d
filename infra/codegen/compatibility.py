"""Compatibility check of JSON Schemas: whether a changed schema still accepts everything that the published
one accepted.

The rule first: every record written under the published schema must be readable, with the same meaning, under
the new one, and no field may vanish, since an older reader may need it. Then each departure: documents
(titles, descriptions, examples) may change freely; a field that is read but never written any more
(`deprecated`) has no constraints; widening is allowed, although an older reader dead-letters a value that it
does not know yet, so readers are upgraded before writers. A keyword that this module does not compare counts
as incompatible when it changes: the module never guesses.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

DOCUMENTATION = frozenset({"$id", "$schema", "$defs", "title", "description", "examples", "deprecated"})
LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
COMPARED = frozenset(
    {"$ref", "type", "enum", "const", "pattern", "properties", "required", "items", "additionalProperties"}
    | {"anyOf", "default", *LOWER_BOUNDS, *UPPER_BOUNDS}
)


class Break(NamedTuple):
    """One incompatible change. `field`: a path such as `spec.workers`, or `event` for the whole."""

    field: str
    text: str


class _Pair(NamedTuple):
    """Both sides at one place, with the roots that their `$ref`s point into."""

    old: Schema
    new: Schema
    old_root: Schema
    new_root: Schema
    field: str

    def at(self, old: Schema, new: Schema, name: str) -> "_Pair":
        path = name if self.field == "event" else f"{self.field}{'' if name == '[]' else '.'}{name}"
        return self._replace(old=old, new=new, field=path)


def breaks(published: Schema, changed: Schema) -> list[Break]:
    """Every incompatible change from `published` to `changed`, both JSON Schemas of one event."""
    return list(_compare(_Pair(published, changed, published, changed, "event")))


def _resolve(schema: Schema, root: Schema) -> Schema:
    """The schema with `$ref` into `#/$defs` followed; keywords beside the `$ref` win."""
    seen = schema
    while "$ref" in seen:
        target: Schema = root["$defs"][str(seen["$ref"]).removeprefix("#/$defs/")]
        seen = {**target, **{key: value for key, value in seen.items() if key != "$ref"}}
    return seen


def _compare(pair: _Pair) -> Iterator[Break]:
    pair = pair._replace(old=_resolve(pair.old, pair.old_root), new=_resolve(pair.new, pair.new_root))
    if pair.new.get("deprecated"):
        return
    if "anyOf" in pair.old or "anyOf" in pair.new:
        yield from _branches(pair)
    else:
        narrowed = list(_types(pair))
        yield from narrowed
        if narrowed:
            return  # the remaining keywords apply to another type
        yield from _values(pair)
        yield from _bounds(pair)
        yield from _object(pair)
        yield from _inner(pair)
    yield from _not_compared(pair)
    if {"default"} <= pair.old.keys() & pair.new.keys():
        old, new = pair.old["default"], pair.new["default"]
        if not _same_default(old, new):
            yield Break(
                pair.field,
                f"its default changed from {old!r} to {new!r}: records without it would change their meaning",
            )


def _same_default(old: object, new: object) -> bool:
    """Equal, but for fields that an object has gained: each of those has its own default in the schema."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and _same_default(value, new[key]) for key, value in old.items())
    return old == new


def _branches(pair: _Pair) -> Iterator[Break]:
    """Each published alternative must fit one of the new ones; the nearest miss shows what is wrong."""
    outer = {"anyOf", "default", *DOCUMENTATION}
    old_rest = {key: value for key, value in pair.old.items() if key not in outer}
    new_rest = {key: value for key, value in pair.new.items() if key not in outer}
    for old in pair.old.get("anyOf", [old_rest]):
        misses = [
            list(_compare(pair._replace(old=old, new=new))) for new in pair.new.get("anyOf", [new_rest])
        ]
        yield from min(misses, key=len)


def _types(pair: _Pair) -> Iterator[Break]:
    old, new = _type_set(pair.old), _type_set(pair.new)
    if "number" in new:
        new = new | {"integer"}
    if new and (not old or old - new):
        lost = ", ".join(sorted(old - new)) or "any"
        yield Break(pair.field, f"its type narrowed: {lost} is no longer allowed")


def _type_set(schema: Schema) -> frozenset[str]:
    kind = schema.get("type", ())
    return frozenset([kind] if isinstance(kind, str) else kind)


def _values(pair: _Pair) -> Iterator[Break]:
    old, new = _allowed(pair.old), _allowed(pair.new)
    if new is None:
        return
    if old is None:
        yield Break(pair.field, f"only some values are allowed now: {', '.join(map(str, new))}")
        return
    removed = [value for value in old if value not in new]
    if removed:
        yield Break(pair.field, f"values were removed: {', '.join(map(str, removed))}")


def _allowed(schema: Schema) -> Sequence[Any] | None:
    """The closed list of values, or None when every value of the type is allowed."""
    if "const" in schema:
        return [schema["const"]]
    values: Sequence[Any] | None = schema.get("enum")
    return values


def _bounds(pair: _Pair) -> Iterator[Break]:
    for key, sign in [*((name, 1) for name in LOWER_BOUNDS), *((name, -1) for name in UPPER_BOUNDS)]:
        old, new = pair.old.get(key), pair.new.get(key)
        if new is not None and (old is None or sign * new > sign * old):
            yield Break(pair.field, f"{key} was tightened from {'none' if old is None else old} to {new}")
    old, new = pair.old.get("pattern"), pair.new.get("pattern")
    if new is not None and old != new:
        yield Break(pair.field, f"its pattern changed from {old!r} to {new!r}")


def _object(pair: _Pair) -> Iterator[Break]:
    old, new = pair.old.get("properties", {}), pair.new.get("properties", {})
    required = set(pair.new.get("required", ()))
    for name, schema in old.items():
        if name not in new:
            yield Break(pair.at({}, {}, name).field, "the field was removed")
        else:
            yield from _compare(pair.at(schema, new[name], name))
    for name in sorted(required - set(pair.old.get("required", ()))):
        if name in old:
            yield Break(pair.at({}, {}, name).field, "an optional field became required")
        else:
            yield Break(pair.at({}, {}, name).field, "a new field is required")


def _inner(pair: _Pair) -> Iterator[Break]:
    """Schemas of the items of lists and the values of maps; `False` and `True` count as nothing and
    anything."""
    for key, mark in (("items", "[]"), ("additionalProperties", "*")):
        old, new = pair.old.get(key, True), pair.new.get(key, True)
        if new is True or old is False:
            continue
        if new is False or old is True:
            yield Break(pair.at({}, {}, mark).field, f"{key} was narrowed")
        else:
            yield from _compare(pair.at(old, new, mark))


def _not_compared(pair: _Pair) -> Iterator[Break]:
    for key in sorted((set(pair.old) | set(pair.new)) - COMPARED - DOCUMENTATION):
        if pair.old.get(key) != pair.new.get(key):
            yield Break(pair.field, f"{key} changed; whether old records still fit cannot be judged")
