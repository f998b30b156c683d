"""Snapshots: serialisation of a cell's state to bytes and back. Canonical: equal states give equal bytes,
whatever they were folded from.

Only what cannot be derived is stored; the queue, the index of nodes and the heap of timers are rebuilt. The
shape follows the state's own dataclasses, so a new field needs no change here. `format_id` identifies the
shape and the fold's version. A snapshot of another format is not read at all: folding from an older one, or
from the beginning, is always correct.
"""

import dataclasses
import heapq
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from itertools import islice
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from penstock.ledger.fold.evolve import FOLD_VERSION
from penstock.ledger.state.index import NOT_PLACEABLE
from penstock.ledger.state.job.job_state import HOLDING, JobState, TaskState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState, Timer
from penstock.model.jobs.job_fields import plain
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import Value

SLICE = (
    256  # entries of a mapping that are written or read at once: this blocks other threads for a millisecond
)

DERIVED = {
    CellState: frozenset(
        {
            "queue",
            "holding",
            "stopping",
            "moving",
            "groups",
            "change_log",
            "progress_log",
            "node_at",
            "droppable",
            "sound_gpus",
            "total_sound_gpus",
            "sound_version",
            "index",
            "timer_heap",
        }
    ),
    NodeState: frozenset({"entered", "gpu_memory_mib", "gpu_uuids", "named", "reserved"}),
}

USUAL = {
    model: {each.name: each.default for each in dataclasses.fields(model) if isinstance(each.default, Value)}
    for model in (JobState, TaskState)
}
"""Parts that most jobs and tasks have in common: one object for all of them."""


class Damaged(Exception):
    """These bytes are not a snapshot that this version can read."""


@cache
def _struct(model: type) -> type[msgspec.Struct]:
    """A struct with a state class's fields except the derived ones."""
    hints = get_type_hints(model)
    fields = [
        (field.name, _wire(hints[field.name]))
        for field in dataclasses.fields(model)
        if field.name not in DERIVED.get(model, ())
    ]
    return msgspec.defstruct(model.__name__, fields, kw_only=True, gc=False)


def _wire(hint: Any) -> Any:
    """The type that a field has inside a snapshot.
    Raises TypeError for a type that a snapshot cannot hold."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_wire(arg) for arg in args)]  # noqa: UP007 - built at run time
    if origin in (dict, OrderedDict, Mapping):
        if get_origin(args[0]) is tuple:  # JSON has no tuple keys: a list of (key, value)
            return list[tuple[args[0], _wire(args[1])]]  # type: ignore[valid-type,misc]
        return dict[args[0], _wire(args[1])]  # type: ignore[valid-type,misc]
    if origin is list:
        return list[_wire(args[0])]  # type: ignore[misc]
    if origin in (tuple, set, frozenset) or hint in (str, int, float, bool, None, types.NoneType):
        return hint
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint  # a NamedTuple
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _struct(hint)
    if isinstance(hint, type) and issubclass(hint, str):
        return hint
    raise TypeError(f"{hint} has no place in a snapshot; teach _wire")


def _shape(kind: Any) -> str:
    """All field names below a type, to distinguish formats."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = (f"{field.name}:{_shape(plain(field.type))}" for field in msgspec.structs.fields(kind))
        return f"{kind.__name__}({','.join(fields)})"
    args = get_args(kind)
    name = getattr(kind, "__name__", str(kind))
    return f"{name}[{','.join(_shape(arg) for arg in args)}]" if args else name


@cache
def format_id() -> str:
    """Identifies the meaning (`FOLD_VERSION`) and the shape of this version's snapshots."""
    return f"{FOLD_VERSION}-{sha256(_shape(_struct(CellState)).encode()).hexdigest()[:16]}"


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of the state or of a node that a snapshot holds."""
    skip = DERIVED.get(type(value), frozenset())
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.name not in skip
    }


def dump(state: CellState) -> bytes:
    """The state's canonical bytes (JSON)."""
    return b"".join(dump_parts(state))


def dump_parts(state: CellState) -> Iterator[bytes]:
    """The bytes of `dump` in pieces, for a thread beside an event loop; the state must not change meanwhile.

    Large mappings are written in slices on lines of their own, which `load_lines` reads one by one; it is the
    same JSON.
    """
    mark = b"{"
    body = ordered(state)
    body["timers"] = {timer_id: state.timers[timer_id] for timer_id in sorted(state.timers)}
    for name, value in body.items():
        yield b'%b"%b":' % (mark, name.encode())
        yield from _mapping(name, value) if isinstance(value, dict) else (msgspec.json.encode(value),)
        mark = b","
    yield b"}"


def ordered(state: CellState) -> dict[str, Any]:
    """The fields that a snapshot holds,
    each but the timers in an order that does not depend on who folded it."""
    body = fields_of(state)
    body["positions"] = sorted((list(key), offset) for key, offset in state.positions.items())
    body["last_inputs"] = sorted((list(key), event_id) for key, event_id in state.last_inputs.items())
    return body


def _mapping(name: str, value: dict[str, Any]) -> Iterator[bytes]:
    sliced = len(value) > SLICE
    entries = iter(value.items())
    yield b"{\n" if sliced else b"{"
    first = True
    while part := dict(islice(entries, SLICE)):
        if name == "nodes":
            part = {node_id: fields_of(node) for node_id, node in part.items()}
        yield (b"" if first else b",\n") + msgspec.json.encode(part)[1:-1]
        first = False
    yield b"\n}" if sliced else b"}"


def load(value: bytes) -> CellState:
    """The state that was dumped; later records fold exactly as with the original. Raises `Damaged`."""
    return load_lines(value.split(b"\n"))


def load_lines(lines: Iterable[bytes]) -> CellState:
    """As `load`, from the lines of a dump."""
    frame: list[bytes] = []
    slices: list[tuple[str, dict[str, Any]]] = []
    try:
        for line in lines:
            if line.startswith(b'"') and frame and frame[-1].endswith(b'":{'):
                name = frame[-1][:-3].rpartition(b'"')[2].decode()
                part = msgspec.json.decode(b"{%b}" % line.removesuffix(b","), type=_field_type(name))
                slices.append((name, _entries(name, part)))
            else:
                frame.append(line)
        found: Any = msgspec.json.decode(b"".join(frame), type=_struct(CellState))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise Damaged(f"no snapshot of format {format_id()}: {error}") from error
    state = cast(CellState, _object(CellState, found))
    state.jobs, state.nodes = _entries("jobs", found.jobs), _entries("nodes", found.nodes)
    state.timers = _entries("timers", found.timers)
    state.ended = OrderedDict(found.ended)
    state.early_estimates = OrderedDict(found.early_estimates)
    state.forgotten_nodes = OrderedDict(found.forgotten_nodes)
    state.refused_joins = OrderedDict(found.refused_joins)
    state.proposals = OrderedDict(found.proposals)
    state.positions = {tuple(key): offset for key, offset in found.positions}
    state.last_inputs = {tuple(key): event_id for key, event_id in found.last_inputs}
    for name, part in slices:
        getattr(state, name).update(part)
    _derive(state)
    return state


def _entries(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Decoded entries of one of the state's mappings."""
    match name:
        case "jobs":
            return {job_id: _job(job) for job_id, job in found.items()}
        case "nodes":
            return {node_id: _object(NodeState, node) for node_id, node in found.items()}
        case "timers":
            return {timer_id: _object(Timer, timer) for timer_id, timer in found.items()}
        case _:
            return found


@cache
def _field_type(name: str) -> Any:
    """Type of a field of the state. Raises KeyError."""
    return {field.name: field.type for field in msgspec.structs.fields(_struct(CellState))}[name]


def _object(model: type[Any], found: Any) -> Any:
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    fields |= {name: usual for name, usual in USUAL.get(model, {}).items() if fields[name] == usual}
    return model(**fields)


def _job(found: Any) -> JobState:
    job = cast(JobState, _object(JobState, found))
    job.tasks = {task_id: _object(TaskState, task) for task_id, task in found.tasks.items()}
    return job


def _derive(state: CellState) -> None:
    """Rebuilds all derived fields."""
    for job in state.jobs.values():
        if job.in_line:
            state.queue[job.order] = job.job_id
        if job.status in HOLDING:
            state.holding[job.order] = job
        if job.status is JobStatus.STOPPING:
            state.stopping[job.order] = job
        if job.target:
            state.moving[job.order] = job
        if job.sharing.group:
            state.groups.setdefault(job.sharing.group, {})[job.job_id] = job
        for task in job.tasks.values():
            state.nodes[task.place.node_id].named += 1
        for place in job.target:
            state.nodes[place.node_id].reserved.add(job.job_id)
    ordinals = 1 + max((node.ordinal for node in state.nodes.values()), default=-1)
    state.node_at = [""] * ordinals
    state.sound_gpus = [0] * ordinals
    for node_id, node in state.nodes.items():
        state.node_at[node.ordinal] = node_id
        node.read_gpus()
        node.entered = node.free()
        state.index.describe(node.bit, node.spec)
        state.index.refit(node.bit, len(node.spec.gpus), NOT_PLACEABLE, node.entered)
        state.sound_gpus[node.ordinal] = node.sound_gpus()
        if node.status is NodeStatus.GONE:
            state.index.lose(node.bit, node.spec)
        if node.cordon is not None:
            state.index.cordoned |= node.bit
        if node.distrust is not None:
            state.index.distrusted |= node.bit
        state.relist(node)
    state.total_sound_gpus = sum(state.sound_gpus)
    state.timer_heap = [(timer.at_ms, timer_id) for timer_id, timer in state.timers.items()]
    heapq.heapify(state.timer_heap)
