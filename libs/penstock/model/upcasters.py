"""From old versions to new: `(type, version)` → a pure function on the JSON object, one step each.

A published version lives for ever. When a meaning changes, raise `VERSION` on the model, add the step
here (`v1_to_v2`), keep the frozen example in `schemas/`: a test replays the example of every version.
"""

import base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from penstock.model.event import Event, wire_type
from penstock.model.external_events import DeadLettered
from penstock.model.ledger_events import JobFoundSchedulable, JobFoundUnschedulable
from penstock.model.outline import outline, outline_of_header

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


def _dead_letter_v1_to_v2(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 held the record's bytes, of a longer one the first 64 KiB, of which size and digest are then."""
    value = base64.b64decode(data.pop("value_base64"))
    headers = {name: outline_of_header(name, text) for name, text in data.get("headers", {}).items()}
    found = {"headers": headers, "size_bytes": len(value), "sha256": sha256(value).hexdigest()}
    return {**data, **found, "outline": outline(value)}


UPCASTERS: Mapping[tuple[str, int], Upcaster] = {(DeadLettered.TYPE, 1): _dead_letter_v1_to_v2}


def _found(event: Any) -> Event:
    """An empty reason took the finding back."""
    return event if event.reason else JobFoundSchedulable(job_id=event.job_id)


SPLIT: Mapping[str, Callable[[Event], Event]] = {wire_type(JobFoundUnschedulable): _found}
"""Wire type of an event that had two meanings → the event that it is now. Its version is still written."""
