"""Values at the ends of their legal ranges, as the types of the events give them: whoever adds a field needs
to add nothing here."""

import types
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_fields import plain
from penstock.model.nouns.types import Value
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import Event, wire_type
from penstock.model.wire.codec import decode, encode

UNBOUNDED = (1 << 53, 1 << 63, 1 << 64, 1 << 70)
"""For whole numbers without an upper bound: beyond what floats, and what 64 bits, hold."""
WIDE, ESCAPED = "\U0001f600", "\x01"
"""Characters of four bytes, and of six in JSON."""
MAX_COPIES = 64
"""Entries of a list that is at its longest: enough to exceed what any table or record was meant for."""
Way = tuple[str | int, ...]
"""Names of fields and places in lists that lead to a leaf."""
E = TypeVar("E", bound=Event)


def at_its_ends(
    event: E, rng: np.random.Generator, changes: int = 2, within: AbstractSet[str] | None = None
) -> E:
    """The event with up to so many of its leaves at an end of their range, and legal as a whole. `within`:
    only leaves of these fields; None: any."""
    leaves = [leaf for leaf in leaves_of(event) if within is None or not within.isdisjoint(leaf[0])]
    for _ in range(changes if leaves else 0):
        way, ends = leaves[int(rng.integers(len(leaves)))]
        try:
            found = legal(_put(event, way, ends[int(rng.integers(len(ends)))]))
        except (IndexError, ValueError):  # a list became shorter; a rule of the value refuses this end
            continue
        if type(found) is type(event):  # some old types are split by their contents
            event = found
    return event


def leaves_of(value: Value) -> list[tuple[Way, list[Any]]]:
    """Where its leaves are, and the ends of their ranges."""
    return [(way, ends) for way, ends in _leaves(type(value), value) if ends]


def legal(event: Event) -> Event | None:
    """The event as it comes in at a door; None: a rule refuses these ends together."""
    try:
        return decode(wire_type(type(event)), encode(event))
    except EventError:
        return None


def _leaves(hint: Any, value: Any, way: Way = ()) -> Iterator[tuple[Way, list[Any]]]:
    """Each leaf of a value, with the ends of its range. A list is a leaf by its length."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(value, Value):
        for field in msgspec.structs.fields(type(value)):
            yield from _leaves(plain(field.type), getattr(value, field.name), (*way, field.name))
    elif origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if value is not None and type(None) in args:
            yield way, [None]
        for arg in inner:
            if value is None:
                yield way, _ends(arg, ())
            else:
                yield from _leaves(arg, value, way)
    elif isinstance(value, tuple):
        yield way, _lengths(hint, value)
        [entry, *_] = get_args(args[0] if origin is Annotated else hint) or (Any,)
        for number, one in enumerate(value):
            yield from _leaves(entry, one, (*way, number))
    elif isinstance(value, Mapping):
        yield way, [{}, {f"K{number}": WIDE for number in range(MAX_COPIES)}]
    else:
        yield way, _ends(hint, ())


def _ends(hint: Any, marks: tuple[Any, ...]) -> list[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _ends(args[0], (*args[1:], *marks))
    if origin is Literal:
        return list(args)
    bounds = {
        name: getattr(mark, name)
        for mark in marks
        if isinstance(mark, Meta)
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length")
        if getattr(mark, name) is not None
    }
    if hint is bool:
        return [False, True]
    if hint in (int, float):
        return _numbers(hint, bounds)
    return _texts(bounds) if hint is str else []


def _numbers(kind: type, bounds: Mapping[str, Any]) -> list[Any]:
    """Where a bound itself is excluded, the nearest number that is not."""
    least, most = bounds.get("ge"), bounds.get("le")
    if "gt" in bounds:
        least = bounds["gt"] + 1 if kind is int else float(np.nextafter(bounds["gt"], np.inf))
    if "lt" in bounds:
        most = bounds["lt"] - 1 if kind is int else float(np.nextafter(bounds["lt"], -np.inf))
    found = list(UNBOUNDED if kind is int else (1e18, 1e300)) if most is None else [most]
    if least is None:
        return [*found, 0, *(-number for number in found)]
    return [least, *found]


def _texts(bounds: Mapping[str, Any]) -> list[str]:
    most = bounds.get("max_length", 1_024)
    return [
        letter * length for letter in ("a", WIDE, ESCAPED) for length in (bounds.get("min_length", 0), most)
    ]


def _lengths(hint: Any, value: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    marks = [mark for mark in get_args(hint) if isinstance(mark, Meta)]
    least = next((mark.min_length for mark in marks if mark.min_length is not None), 0)
    most = next((mark.max_length for mark in marks if mark.max_length is not None), MAX_COPIES)
    if not value:
        return []
    return [value[:least], (value * most)[: min(most, MAX_COPIES)]]


def _put(value: Any, way: Way, end: Any) -> Any:
    if not way:
        return end
    step, *rest = way
    if isinstance(step, int):
        return (*value[:step], _put(value[step], tuple(rest), end), *value[step + 1 :])
    return msgspec.structs.replace(value, **{step: _put(getattr(value, step), tuple(rest), end)})


def about(state: CellState, event: E, rng: np.random.Generator) -> E:
    """The event with ids of jobs, tasks and nodes that exist, and the tokens that they have, also in its
    parts."""
    jobs, nodes = list(state.jobs.values()), sorted(state.nodes)
    if isinstance(event, JobSubmitted) or not jobs or not nodes:
        return event
    job = jobs[int(rng.integers(len(jobs)))]
    node_id = nodes[int(rng.integers(len(nodes)))]
    known: dict[str, Any] = {"job_id": job.job_id, "attempt": max(1, job.attempt), "node_id": node_id}
    if job.tasks:
        task = list(job.tasks.values())[int(rng.integers(len(job.tasks)))]
        known |= {"token": job.token, "task_id": task.place.task_id, "node_id": task.place.node_id}
    known["nodes"] = (known["node_id"],) * (1 if job.estimate is None else job.demand.tasks)
    return legal(_renamed(event, known)) or event  # type: ignore[return-value]


def _renamed(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_renamed(one, known) for one in value)
    if not isinstance(value, Value):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return msgspec.structs.replace(
        value,
        **{
            name: known[name]
            if name in known and type(known[name]) is type(found)
            else _renamed(found, known)
            for name, found in fields.items()
        },
    )
