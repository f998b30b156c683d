"""Set of ledger events that are decisions of the placer, as shown to users who trace decisions.

Every event that exists only inside ledger records is a decision, except those in `BOOKKEEPING`.
"""

from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import BandwidthDecided, CheckpointDecided, CoresDecided
from penstock.model.decisions.arrays import ArraysSized, CoresReclaimed
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.decisions.groups import GroupDecided, GroupDissolved
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened, PlanAdopted
from penstock.model.schema.event import Event

DECISIONS: frozenset[type[Event]] = frozenset(
    {
        ledger_events.TermStarted,
        ledger_events.InputAccepted,
        ledger_events.LedgerAccepted,
        ledger_events.PlacementDecided,
        ledger_events.StopDecided,
        CoresDecided,
        BandwidthDecided,
        CheckpointDecided,
        GroupDecided,
        GroupDissolved,
        MoveDecided,
        MoveGivenUp,
        JobConverged,
        ArraysSized,
        CoresReclaimed,
        NodeDistrusted,
        NodePutOnProbation,
        NodeTrusted,
        PlanAdopted,
        BatchWindowOpened,
        BatchWindowClosed,
        ledger_events.JobPreempted,
        ledger_events.JobRequeued,
        ledger_events.JobQueued,
        ledger_events.JobsRanked,
        ledger_events.JobFoundUnschedulable,
        ledger_events.JobFoundSchedulable,
        ledger_events.JobEnded,
        ledger_events.TaskLost,
        ledger_events.NodeLost,
        ledger_events.NodeProbed,
        ledger_events.ProbeExpired,
        ledger_events.NodeRestored,
        ledger_events.NodeJoinRefused,
        ledger_events.CellFrozen,
        ledger_events.CellThawed,
        ledger_events.ChoiceFailed,
        ledger_events.ProposalAnswered,
    }
)

BOOKKEEPING: frozenset[type[Event]] = frozenset({ledger_events.TimerSet, ledger_events.TimerFired})
"""Timer events: a timer was set, or has fired."""
