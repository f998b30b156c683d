"""Ledger events after which a plan of who runs may come out differently.

Ideal: whatever a plan depends on. Departure: remaining times move all the while, and what the batcher's own plan does (jobs that it
stopped queue again, jobs that it placed start) is what it has planned already; neither asks for another plan.
"""

from penstock.model import external_events, ledger_events
from penstock.model.estimates import JobEstimated, StagesProfiled
from penstock.model.event import Event

CHANGES: frozenset[type[Event]] = frozenset(
    {
        # a job came into the queue, for the first time or after a failure
        JobEstimated,
        ledger_events.JobQueued,
        ledger_events.JobFoundSchedulable,
        external_events.JobReleaseRequested,
        # or left it
        external_events.JobHoldRequested,
        ledger_events.JobEnded,
        # what jobs of a kind need, also of those that wait or run already
        StagesProfiled,
        # capacity
        external_events.NodeJoined,
        external_events.NodeChanged,
        external_events.NodeSuspected,
        external_events.NodeCordoned,
        external_events.NodeUncordoned,
        external_events.NodeLeft,
        external_events.GpuFaulted,
        ledger_events.NodeLost,
        ledger_events.NodeRestored,
        ledger_events.CellThawed,
        ledger_events.TermStarted,
    }
)

OF_PLANS = frozenset({"preempted", "migrated"})
"""Why a job queues again although nothing has happened to it."""


def asks_for_plan(fact: Event) -> bool:
    """Whether a plan made before this fact may be out of date."""
    if isinstance(fact, ledger_events.JobRequeued):
        return fact.not_before_ms is None and fact.reason not in OF_PLANS
    return type(fact) in CHANGES
