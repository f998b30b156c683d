"""Validation of migrations: whether a running job may be moved as proposed, on exactly this state; and its
new places."""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster.assignment import place_on
from penstock.cluster.reasons import Refusal, frozen, unknown, why_not
from penstock.cluster.view import ClusterView, living_places
from penstock.ledger.derived.succession import followers
from penstock.ledger.fold.plans import reserved_nodes
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.moves import MAX_MIGRATIONS, MoveCause
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement
from penstock.model.proposals import MigrationProposed


def validate_move(state: CellState, proposal: MigrationProposed) -> tuple[TaskPlacement, ...] | Refusal:
    """As `target_of`; a proposal with cause `converged` may also name the job's current nodes: then it stays,
    and there are no places."""
    job = state.jobs.get(proposal.job_id)
    if job is not None and cause_of(proposal) and (wrong := _moved_enough(job, proposal)):
        return Refusal("wrong_state", f"{job.job_id} {wrong}")
    if job is not None and proposal.cause == "converged" and nodes_of(job) == proposal.nodes:
        if (still := frozen(state)) is not None:
            return still
        if job.status is not JobStatus.RUNNING:
            return Refusal("wrong_state", f"{job.job_id} is {job.status}, not running")
        return ()
    return target_of(state, proposal.job_id, proposal.nodes)


def cause_of(proposal: MigrationProposed) -> MoveCause:
    """Cause of the decision: a service that names none is bounded like one that does."""
    return proposal.cause or ("" if proposal.by else "other")


def _moved_enough(job: JobState, proposal: MigrationProposed) -> str | None:
    if proposal.cause == "converged" and job.moves.converged_ms is not None:
        return "was judged by its convergence before: that happens once"
    if proposal.cause == "rebalance" and job.moves.rebalanced:
        return "was moved for the balance of nodes before: that happens once"
    migrations = job.moves.migrations
    if migrations >= MAX_MIGRATIONS:
        return f"was moved {migrations} times by services: no more than {MAX_MIGRATIONS} are allowed"
    return None


def nodes_of(job: JobState) -> tuple[str, ...]:
    """Nodes of its attempt, per task in rank order."""
    return tuple(task.place.node_id for task in job.tasks.values())


def target_of(state: CellState, job_id: str, nodes: tuple[str, ...]) -> tuple[TaskPlacement, ...] | Refusal:
    """The places of the job's next attempt, in rank order: what is free now or held by the job itself, lowest
    first.

    A moldable job then has as many workers as nodes are named.

    Ideal: all resources of the job count as free. Departure: except its parts of GPUs, which others may
    share.
    """
    if (still := frozen(state)) is not None:
        return still
    job = state.jobs.get(job_id)
    if job is None:
        return unknown(state, job_id)
    if (wrong := _cannot_move(state, job)) is not None:
        return Refusal("wrong_state", f"{job.job_id} {wrong}")
    if job.spec.min_workers is not None and job.spec.min_workers <= len(nodes) <= job.spec.workers:
        job = job.shaped(len(nodes))
    if len(nodes) != job.demand.tasks:
        detail = f"{job.job_id} has {job.demand.tasks} tasks, and {len(nodes)} nodes are named"
        return Refusal("invalid", detail)
    if nodes_of(job) == nodes:
        return Refusal("invalid", f"{job.job_id} runs on these nodes already")
    here = {task.place.node_id for task in job.tasks.values()}
    if job.sharing.group and (same := sorted(here & set(nodes))):
        detail = (
            f"{job.job_id} shares GPUs of {', '.join(same)} with its group: it can move to other nodes only"
        )
        return Refusal("invalid", detail)
    return _places(state, job, nodes)


def _cannot_move(state: CellState, job: JobState) -> str | None:
    if job.status is not JobStatus.RUNNING:
        return f"is {job.status}, not running"
    if job.held is not None:
        return "is held: it would not start again"
    if next_jobs := followers(state, job):
        return f"is about to end, and {', '.join(next_jobs)} waits for its GPUs"
    return None if job.spec.preemptible else "may not be stopped: preemptible is false"


def _places(state: CellState, job: JobState, nodes: Sequence[str]) -> tuple[TaskPlacement, ...] | Refusal:
    demand, reserved = job.demand, reserved_nodes(state)
    view = _without(state, job, nodes)
    places = []
    for rank, (node_id, need) in enumerate(zip(nodes, demand.needs(), strict=True)):
        node = view.node(node_id)
        lacking = "no such node" if node is None else why_not(state, node, need, demand.where)
        if node_id in reserved:
            lacking = "it is reserved for a proposed plan"
        if node is None or lacking:
            return Refusal("infeasible", f"task {rank} of {job.job_id} on {node_id}: {lacking}")
        places.append(place_on(node, job, demand, rank))
        view.claim_places(places[-1:])
    return tuple(places)


def _without(state: CellState, job: JobState, nodes: Sequence[str]) -> ClusterView:
    """These nodes without what the job holds."""
    view = ClusterView(state)
    for place in living_places(job):
        if place.node_id in nodes:
            whole = place.gpu_share_milli == WHOLE_GPU
            view.release_places([place if whole else replace(place, gpus=(), gpu_share_milli=WHOLE_GPU)])
    return view


def can_go(state: CellState, job: JobState, nodes: tuple[str, ...]) -> bool:
    """Whether the placer would move it there on this state."""
    return not isinstance(target_of(state, job.job_id, nodes), Refusal)
