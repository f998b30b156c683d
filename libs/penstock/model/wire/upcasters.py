"""Upcasters of events from old versions to new: `(type, version)` → a pure function on the JSON object, one
step each.

A published version lives for ever. When a meaning changes, raise `VERSION` on the model, add the step
here (`v1_to_v2`), keep the frozen example in `schemas/`: a test replays the example of every version.
"""

import base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from penstock.model.decisions.ledger_events import JobFoundSchedulable, JobFoundUnschedulable, TermStarted
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.nouns.settings import own_settings_apart
from penstock.model.proposals import MigrationProposed, PlanProposed
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.outline import outline, outline_of_header

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


def _dead_letter_v1_to_v2(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 held the record's bytes, at most the first 64 KiB; size and digest are computed from
    these."""
    value = base64.b64decode(data.pop("value_base64"))
    headers = {name: outline_of_header(name, text) for name, text in data.get("headers", {}).items()}
    found = {"headers": headers, "size_bytes": len(value), "sha256": sha256(value).hexdigest()}
    return {**data, **found, "outline": outline(value)}


def _migration_v1_to_v2(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 named GPUs and cores, too."""
    plan = data.pop("plan")
    return {**data, "job_id": plan["job_id"], "nodes": [task["node_id"] for task in plan["tasks"]]}


def _plan_v1_to_v2(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 named GPUs and cores, too, and was answered as a whole; a group becomes one unit, a batch one
    unit per job."""
    group = data.pop("kind") == "group"
    jobs = [
        {"job_id": plan["job_id"], "nodes": [task["node_id"] for task in plan["tasks"]]}
        for plan in data.pop("plans")
    ]
    if group:
        return {**data, "units": [{"jobs": jobs, "kind": "group", "explanation": ""}]}
    return {**data, "units": [{"jobs": [job], "explanation": ""} for job in jobs]}


UPCASTERS: Mapping[tuple[str, int], Upcaster] = {
    (DeadLettered.TYPE, 1): _dead_letter_v1_to_v2,
    (MigrationProposed.TYPE, 1): _migration_v1_to_v2,
    (PlanProposed.TYPE, 1): _plan_v1_to_v2,
}


def _term_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Earlier releases had a profile's own settings as fields of `PlacerSettings`."""
    return {**data, "settings": own_settings_apart(data["settings"])}


FOLDED: Mapping[str, Upcaster] = {wire_type(TermStarted): _term_settings}
"""Wire type → upcaster within a version, of `FORMER` fields: earlier releases wrote them under this
version."""


def _found(event: Any) -> Event:
    """An empty reason revoked the finding."""
    return event if event.reason else JobFoundSchedulable(job_id=event.job_id)


SPLIT: Mapping[str, Callable[[Event], Event]] = {wire_type(JobFoundUnschedulable): _found}
"""Wire type of an event that had two meanings → function that returns the event with its present meaning. Its
version is still written."""
