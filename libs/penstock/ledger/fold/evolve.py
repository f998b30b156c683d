"""The one fold of the ledger: `evolve(state, fact)` is mechanical and makes no choices.

Every reader (placer, gateway, projector, estimator, simulator, replay) folds with this function, so all of
them agree. A fact that the tables of legal transitions forbid raises `IllegalTransition`: it is a bug, and
readers stop before its record until that is amended (`penstock.ledger.record.amendment`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.errors import one_line
from penstock.ledger.derived import departed, stages
from penstock.ledger.fold import (
    evidence,
    evolve_adjustments,
    evolve_arrays,
    evolve_groups,
    evolve_holds,
    evolve_jobs,
    evolve_moves,
    evolve_nodes,
    evolve_tasks,
    plans,
)
from penstock.ledger.record.record import RawRecord, UnfoldableRecord
from penstock.ledger.state import followers, lease, timers
from penstock.ledger.state.state import CellState, FailedChoices
from penstock.model.decisions import adjustments, ledger_events
from penstock.model.decisions.arrays import ArraysSized, CoresReclaimed
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.decisions.groups import GroupDecided, GroupDissolved
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened, PlanAdopted
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated, StagesProfiled
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.inputs.saves import SaveRefused
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic

FOLD_VERSION = 48
"""Incremented whenever a ledger folds to another state than before, so that no reader continues from a
snapshot of the former meaning. Terms record it. `tests/replay/test_golden.py` fails if the increment is
missing."""


Hook = Callable[[RawRecord, int, Event], None]
"""Called in place of `evolve` with the record, the fact's position in it and the fact. It calls `evolve`
itself, so that it sees the state before and after the fact."""


def fold(state: CellState, record: RawRecord, hook: Hook | None = None, offset: int = -1) -> None:
    """Folds one valid record: time, position, facts. `offset`: the record's own.

    Raises `UndecodableRecord` before anything is folded: the state stays that of the record before. Raises
    `UnfoldableRecord` where a fact cannot be folded: the state must be dropped.
    """
    facts = record.events(offset)
    begin(state, record.seq, record.now_ms, record.term)
    cause = record.cause
    if cause.topic is not None:
        answered(state, cause.topic, cause.partition, cause.offset, cause.event_id or "")
    for n, fact in enumerate(facts):
        try:
            if hook is None:
                evolve(state, fact)
            else:
                hook(record, n, fact)
        except Exception as error:
            kind = record.facts[n].type
            raise UnfoldableRecord(offset, record.seq, kind, n, one_line(error)) from error


def begin(state: CellState, seq: int, now_ms: int, term: int) -> None:
    """Begins a record: its seq is part of the tokens of its decisions, its time is the only clock.

    Nodes are dropped here and nowhere else, so that none disappears while a record refers to it.
    """
    state.seq = seq
    state.now_ms = now_ms
    state.term = term
    if len(state.droppable) > departed.MAX_GONE_NODES:
        departed.drop(state)


def answered(state: CellState, topic: str, partition: int, offset: int, event_id: str) -> None:
    """Stores that the record answers this input."""
    place = (topic, partition)
    state.positions[place] = offset + 1
    state.last_inputs[place] = event_id


def evolve(state: CellState, fact: Event) -> None:
    """Folds one fact. Facts without effect on the state (such as: a model was trained) are ignored."""
    handler = HANDLERS.get(type(fact))
    if handler is not None:
        handler(state, fact)


def _term_started(state: CellState, fact: ledger_events.TermStarted) -> None:
    state.term = fact.term
    state.settings = fact.settings


def _input_accepted(state: CellState, fact: ledger_events.InputAccepted) -> None:
    place = (fact.topic, fact.partition)
    state.positions[place] = fact.offset
    state.last_inputs[place] = ""
    if fact.topic == Topic.NODES:
        state.rejoin_offset = fact.end
        evolve_nodes.answers_lost(state)


def _ledger_accepted(state: CellState, fact: ledger_events.LedgerAccepted) -> None:
    state.epoch = fact.epoch
    state.rejoin_offset = fact.nodes_offset
    evolve_nodes.answers_lost(state)
    evolve_adjustments.ledger_lost(state)


def _cell_frozen(state: CellState, fact: ledger_events.CellFrozen) -> None:
    state.frozen = fact.reason


def _cell_thawed(state: CellState, fact: ledger_events.CellThawed) -> None:
    state.frozen = ""


def _choice_failed(state: CellState, fact: ledger_events.ChoiceFailed) -> None:
    before = state.failed_choices
    state.failed_choices = FailedChoices(
        before.count + 1,
        before.in_a_row + 1,
        state.seq,
        state.now_ms,
        fact.profile,
        fact.job_id,
        fact.error,
    )


HANDLERS: Mapping[type[Event], Callable[[CellState, Any], None]] = MappingProxyType(
    {
        external_events.JobSubmitted: evolve_jobs.job_submitted,
        JobEstimated: evolve_jobs.job_estimated,
        ledger_events.PlacementDecided: evolve_jobs.placement_decided,
        ledger_events.StopDecided: evolve_jobs.stop_decided,
        ledger_events.JobRequeued: evolve_jobs.job_requeued,
        ledger_events.JobQueued: evolve_jobs.job_queued,
        ledger_events.JobFoundUnschedulable: evolve_jobs.job_found_unschedulable,
        ledger_events.JobFoundSchedulable: evolve_jobs.job_found_schedulable,
        ledger_events.JobEnded: evolve_jobs.job_ended,
        FollowerChanged: followers.follower_changed,
        external_events.JobHoldRequested: evolve_holds.job_held,
        external_events.JobReleaseRequested: evolve_holds.job_released,
        ledger_events.JobsRanked: evolve_jobs.jobs_ranked,
        ArraysSized: evolve_arrays.arrays_sized,
        CoresReclaimed: evolve_arrays.cores_reclaimed,
        PlanAdopted: plans.plan_adopted,
        ledger_events.ProposalAnswered: plans.proposal_answered,
        BatchWindowOpened: plans.window_opened,
        BatchWindowClosed: plans.window_closed,
        external_events.WorkProgressed: evolve_jobs.work_progressed,
        EtaEstimated: evolve_jobs.eta_estimated,
        StagesProfiled: stages.stages_profiled,
        external_events.TaskStarted: evolve_tasks.task_started,
        external_events.TaskExited: evolve_tasks.task_exited,
        external_events.TaskPhaseChanged: evolve_nodes.counted(evolve_tasks.phase_changed),
        external_events.TaskCheckpointed: evolve_nodes.counted(evolve_tasks.task_checkpointed),
        SaveRefused: evolve_nodes.counted(evolve_tasks.save_refused),
        external_events.CheckpointFetched: evolve_nodes.counted(evolve_tasks.checkpoint_fetched),
        external_events.StepsMeasured: evolve_nodes.counted(evolve_tasks.steps_measured),
        external_events.StagesMeasured: evolve_nodes.counted(lambda state, fact: None),
        ledger_events.TaskLost: evolve_tasks.task_lost,
        external_events.OrderRefused: evolve_tasks.order_refused,
        GroupDecided: evolve_groups.group_decided,
        GroupDissolved: evolve_groups.group_dissolved,
        MoveDecided: evolve_moves.move_decided,
        MoveGivenUp: evolve_moves.move_given_up,
        JobConverged: evolve_moves.job_converged,
        adjustments.CoresDecided: evolve_adjustments.cores_decided,
        adjustments.BandwidthDecided: evolve_adjustments.bandwidth_decided,
        adjustments.CheckpointDecided: evolve_adjustments.checkpoint_decided,
        adjustments.TaskAdjusted: evolve_adjustments.task_adjusted,
        external_events.NodeJoined: evolve_nodes.node_joined,
        external_events.NodeChanged: evolve_nodes.node_changed,
        external_events.NodeSuspected: evolve_nodes.node_suspected,
        ledger_events.NodeProbed: lease.node_probed,
        external_events.ProbeSent: lease.probe_sent,
        ledger_events.ProbeExpired: lease.probe_expired,
        external_events.NodeCordoned: evolve_nodes.node_cordoned,
        external_events.NodeUncordoned: evolve_nodes.node_uncordoned,
        external_events.NodeLeft: evolve_nodes.node_left,
        ledger_events.NodeLost: evolve_nodes.node_lost,
        ledger_events.NodeJoinRefused: evolve_nodes.node_join_refused,
        ledger_events.NodeRestored: evolve_nodes.node_restored,
        NodeDistrusted: evidence.node_distrusted,
        NodePutOnProbation: evidence.node_put_on_probation,
        NodeTrusted: evidence.node_trusted,
        external_events.GpuFaulted: evolve_nodes.counted(evolve_nodes.gpu_faulted),
        ledger_events.TermStarted: _term_started,
        ledger_events.InputAccepted: _input_accepted,
        ledger_events.LedgerAccepted: _ledger_accepted,
        ledger_events.CellFrozen: _cell_frozen,
        ledger_events.CellThawed: _cell_thawed,
        ledger_events.ChoiceFailed: _choice_failed,
        ledger_events.TimerSet: timers.timer_set,
        ledger_events.TimerFired: timers.timer_gone,
    }
)
