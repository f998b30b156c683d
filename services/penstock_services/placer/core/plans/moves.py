"""Moves of running jobs: decided with a reserved target, carried out when the stop is proven, dropped when
the target is lost."""

from collections.abc import Iterator

from penstock.cluster.reasons import Refusal
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import full_mask, mask_of
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import MAX_TEXT, TaskPlacement
from penstock.model.proposals import MigrationProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting.validate_moves import cause_of, validate_move
from penstock_services.placer.core.common import Explain, Stopped, explained, leaving, start_deadline, stop


def decided(state: CellState, proposal: MigrationProposed, explain: Explain) -> Iterator[Event]:
    """For a proposal that `validate` has accepted on this state."""
    job, target = state.jobs[proposal.job_id], validate_move(state, proposal)
    assert not isinstance(target, Refusal), target
    by = proposal.by or proposal.proposer
    if proposal.cause == "converged":
        moves = bool(target)
        yield JobConverged(job_id=job.job_id, attempt=job.attempt, moves=moves, by=by, reason=proposal.reason)
    if not target:
        return
    explain(explained(state, job, target, by, proposal.reason, leaving(state, job)))
    yield MoveDecided(
        job_id=job.job_id,
        attempt=job.attempt,
        tasks=target,
        by=by,
        reason=proposal.reason,
        cause=cause_of(proposal),
    )
    yield from stop(state, job, "migrated")


def give_up_lost(state: CellState) -> Iterator[Event]:
    """Drops moves whose targets can no longer be used, after any change of that. O(tasks that are to
    move)."""
    for job in list(state.moving.values()):
        if lost := _lost(state, job):
            yield _given_up(job, lost)


def arrive(state: CellState, job: JobState, explain: Explain) -> Iterator[Event]:
    """Every task is proven dead: the job starts at its target, or drops the move and has to be queued."""
    lost = _lost(state, job) or _not_now(state, job)
    if lost:
        yield _given_up(job, lost)
        return
    target, move = job.target, job.moves.latest
    assert move is not None
    stopped = Stopped(state, job, move)
    yield ledger_events.JobRequeued(job_id=job.job_id, attempt=job.attempt, reason="migrated")
    yield ledger_events.PlacementDecided(job_id=job.job_id, attempt=job.attempt + 1, tasks=target)
    explain(explained(state, job, target, move.by, move.reason, stopped.moved(job, move)))
    yield start_deadline(state, job)


def _given_up(job: JobState, why: str) -> MoveGivenUp:
    return MoveGivenUp(job_id=job.job_id, attempt=job.attempt, reason=why[:MAX_TEXT])


def _lost(state: CellState, job: JobState) -> str:
    """Why nothing can start at its target at any later time; empty: something can."""
    if job.held is not None:
        return "the job is held"
    return next((why for place in job.target if (why := _unusable(state, place))), "")


def _unusable(state: CellState, place: TaskPlacement) -> str:
    node = state.nodes.get(place.node_id)
    if node is None or node.status is NodeStatus.GONE:
        return f"{place.node_id} is gone"
    if node.cordon is not None:
        return f"{place.node_id} is cordoned"
    if mask_of(place.gpus) & (node.unusable_gpu_mask | ~node.present_gpu_mask):
        return f"a GPU of {place.node_id} is faulted or gone"
    shrunk = node.free_host_memory_mib < 0 or node.free_bandwidth_mbps < 0
    if shrunk or mask_of(place.cores) & ~full_mask(node.spec.cores):
        return f"{place.node_id} has become smaller"
    return ""


def _not_now(state: CellState, job: JobState) -> str:
    """Why nothing may start at its target now; empty: it may."""
    if state.frozen:
        return "the cell is frozen"
    silent = (
        place.node_id
        for place in job.target
        if (node := state.nodes[place.node_id]).leaving or node.status is not NodeStatus.READY
    )
    found = next(silent, None)
    return "" if found is None else f"{found} is silent"
