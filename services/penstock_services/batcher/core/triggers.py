"""Replanning triggers: ledger events after which a plan of which jobs run may come out differently.

Ideal: every change of a plan's inputs. Departure: remaining times change all the time, and the effects of the
batcher's own plan (jobs that it stopped queue again, jobs that it placed start) are planned already; neither
asks for another plan.
"""

from penstock.model.decisions import ledger_events
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.decisions.groups import GroupDissolved
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated, StagesProfiled
from penstock.model.schema.event import Event

CHANGES: frozenset[type[Event]] = frozenset(
    {
        # a job entered the queue, for the first time or after a failure
        JobEstimated,
        ledger_events.JobQueued,
        ledger_events.JobFoundSchedulable,
        external_events.JobReleaseRequested,
        # a job left the queue
        external_events.JobHoldRequested,
        ledger_events.JobEnded,
        # the resources of jobs of a kind, also of waiting and running ones
        StagesProfiled,
        # which jobs share GPUs
        GroupDissolved,
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
        NodeDistrusted,
        NodePutOnProbation,
        NodeTrusted,
        ledger_events.CellThawed,
        ledger_events.TermStarted,
    }
)

OF_PLANS = frozenset({"preempted", "migrated"})
"""Reasons for which a job queues again although nothing about the job itself has changed."""


def asks_for_plan(fact: Event) -> bool:
    """Whether a plan made before this fact may be out of date."""
    if isinstance(fact, ledger_events.JobRequeued):
        return fact.not_before_ms is None and fact.reason not in OF_PLANS
    return type(fact) in CHANGES
