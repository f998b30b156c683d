"""From old versions to new: `(type, version)` → a pure function on the JSON object, one step each.

A published version lives for ever. When a meaning changes, raise `VERSION` on the model, add the step
here (`v1_to_v2`), keep the frozen example in `schemas/`: a test replays the example of every version.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.model.event import Event, wire_type
from penstock.model.ledger_events import JobFoundSchedulable, JobFoundUnschedulable

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Mapping[tuple[str, int], Upcaster] = {}


def _found(event: Any) -> Event:
    """An empty reason took the finding back."""
    return event if event.reason else JobFoundSchedulable(job_id=event.job_id)


SPLIT: Mapping[str, Callable[[Event], Event]] = {wire_type(JobFoundUnschedulable): _found}
"""Wire type of an event that had two meanings → the event that it is now. Its version is still written."""
