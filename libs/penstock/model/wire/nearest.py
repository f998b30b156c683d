"""The nearest legal values in place of those outside of their bounds, for what must not be lost as a whole.

Used by amendments of ledger records, which an operator reads first; by the placer for what nodes and
estimator report, and by all readers for marked facts (`penstock.model.wire.additions`): a later version may
know values and ranges that this one does not.
"""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.model.schema.errors import EventError
from penstock.model.schema.event import REGISTRY, Event
from penstock.model.schema.validation import checked_json
from penstock.model.wire.codec import decode_fact

MAX_ROUNDS = 64  # of bounding one fact: rules may only be checked once all fields are within their bounds

CUT = {"string_too_long": "max_length", "too_long": "max_length"}
NEAREST = {
    "less_than_equal": ("le", 0),
    "less_than": ("lt", -1),
    "greater_than_equal": ("ge", 0),
    "greater_than": ("gt", 1),
}
"""Kind of a problem → the constraint that names the bound, and the step from it to a legal whole number."""

TOLERATED: Mapping[str, Mapping[str, str | None]] = MappingProxyType(
    {
        "penstock.node.joined": {
            "cores": "affinity",
            "host_memory_mib": None,
            "bandwidth_mbps": None,
            "memory_mib": None,
            "gpus": None,
            "index": None,
            "fault": "xid",
            "exits": "none",
            "memory": "process",
            "devices": "hint",
            "bandwidth": "none",
            "contention": "none",
            "memory_bandwidth": "none",
            "reason": None,
            "version": None,
        },
        "penstock.gpu.faulted": {"fault": "xid", "detail": None},
        "penstock.task.exited": {
            "cause": "lost",
            "exhausted": "",
            "exit_code": None,
            "signal": None,
            "started_ms": None,
            "exited_ms": None,
            "gpu_utilisation_percent": None,
            "gpu_utilisation_std": None,
            "gpu_memory_limit_mib": None,
            "detail": None,
        },
        "penstock.order.refused": {"reason": "occupied", "detail": None},
        "penstock.task.adjusted": {"enforced": "", "detail": None},
        "penstock.job.estimated": {
            "tier": "default",
            "first_of_kind": "gpu_model",
            "options": None,
            "pairs": None,
            "source": None,
        },
        "penstock.cores.decided": {"cause": "other"},
        "penstock.bandwidth.decided": {"cause": "other"},
        "penstock.move.decided": {"cause": "other"},
        "penstock.stop.decided": {"reason": "preempted"},
        "penstock.job.requeued": {"reason": "preempted"},
    }
)
"""Type of a report or decision → its fields of which a value that only a later version knows costs that value
alone: it becomes the one given here, a number or text the nearest legal one. Those here promise least: an
unknown cause is no success, an unknown proof of a task's end none. A field that identifies something, counts
or proves is never here."""


class Change(NamedTuple):
    """One field that is changed, or one fact that an amendment leaves out."""

    n: int
    type: str
    field: str
    """As `units.0.expected_ms`; empty: the whole fact."""
    given: Any
    becomes: Any
    problem: str


def bounded(
    n: int, kind: str, data: bytes, fields: Mapping[str, str | None] | None = None
) -> tuple[list[Change], str | None]:
    """The changes of the `n`th fact and its new JSON; None: no bound helps. `fields`: as in `TOLERATED`;
    None: numbers and texts of all fields."""
    model = REGISTRY.get(kind)
    if model is None:  # an older version: its bounds are not known any more
        return [], None
    found, changes = json.loads(data), []
    for _ in range(MAX_ROUNDS):
        problems = _problems(model, json.dumps(found))
        if not problems:
            break
        round_ = [_nearest(n, kind, found, problem, fields) for problem in problems]
        if None in round_:
            return [], None
        changes += [change for change in round_ if change is not None]
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    try:
        decode_fact(kind, text.encode())
    except EventError:
        return [], None
    return changes, text


def tolerated(kind: str, data: bytes) -> Event | None:
    """A report that this version refuses, with the nearest values that it knows; None: that does not help."""
    fields = TOLERATED.get(kind.rpartition(".v")[0])
    if fields is None:
        return None
    try:
        _, text = bounded(0, kind, data, fields)
    except (ValueError, RecursionError):
        return None
    return None if text is None else decode_fact(kind, text.encode())


def _problems(model: type[Event], text: str) -> list[ErrorDetails]:
    try:
        checked_json(model, text, "ignore")
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _nearest(
    n: int, kind: str, found: Any, problem: ErrorDetails, fields: Mapping[str, str | None] | None
) -> Change | None:
    """Puts the nearest legal value into `found`; None: this kind of problem has no nearest value."""
    *way, last = problem["loc"] or (None,)
    bounds: dict[str, Any] = problem.get("ctx", {})
    name = next((part for part in reversed(problem["loc"]) if isinstance(part, str)), "")
    if fields is not None and name not in fields:
        return None
    try:
        place = _at(found, way)
        given = place[last]
    except (LookupError, TypeError):
        return None
    becomes: Any
    if problem["type"] in NEAREST:
        bound, step = NEAREST[problem["type"]]
        becomes = bounds[bound] + step if isinstance(given, int) else bounds[bound]
    elif problem["type"] in CUT:
        becomes = given[: bounds[CUT[problem["type"]]]]
    elif (
        problem["type"] == "literal_error" and isinstance(given, str) and (fields or {}).get(name) is not None
    ):
        becomes = (fields or {})[name]
    else:
        return None
    place[last] = becomes
    return Change(n, kind, ".".join(map(str, problem["loc"])), given, becomes, problem["msg"])


def _at(fields: Any, way: Iterable[Any]) -> Any:
    for part in way:
        fields = fields[part]
    return fields
