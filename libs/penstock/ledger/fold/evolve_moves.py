"""Fold of migrations (moves): while a job is being stopped to resume elsewhere, its target is reserved,
booked on the target's nodes.

What the job's living tasks hold of the target stays booked for them until their exit is proven; then it
passes to the reservation.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.moves import Move
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.moves import JobConverged, MoveDecided, MoveGivenUp
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement


def taken(job: JobState, node_id: str) -> Iterator[TaskPlacement]:
    """What the reservation takes of a node beyond what the job's living tasks hold there."""
    living = [
        task.place
        for task in job.tasks.values()
        if task.place.node_id == node_id and task.status is not TaskStatus.EXITED
    ]
    gpus = {gpu for place in living if place.gpu_share_milli == WHOLE_GPU for gpu in place.gpus}
    cores = {core for place in living for core in place.cores}
    memory_mib = sum(place.host_memory_mib for place in living)
    bandwidth_mbps = sum(place.bandwidth_mbps for place in living)
    for place in job.target:
        if place.node_id != node_id:
            continue
        own_mib, own_mbps = min(memory_mib, place.host_memory_mib), min(bandwidth_mbps, place.bandwidth_mbps)
        memory_mib, bandwidth_mbps = memory_mib - own_mib, bandwidth_mbps - own_mbps
        yield replace(
            place,
            gpus=tuple(gpu for gpu in place.gpus if gpu not in gpus),
            cores=tuple(core for core in place.cores if core not in cores),
            host_memory_mib=place.host_memory_mib - own_mib,
            bandwidth_mbps=place.bandwidth_mbps - own_mbps,
        )


def keep(node: NodeState, job: JobState) -> None:
    """Reserves what the job's target takes of the node."""
    for place in taken(job, node.spec.node_id):
        node.give(place)


def let_go(node: NodeState, job: JobState) -> None:
    """Undoes `keep`; the same tasks must be living."""
    for place in taken(job, node.spec.node_id):
        node.take_back(place)


def move_decided(state: CellState, fact: MoveDecided) -> None:
    job = state.jobs[fact.job_id]
    nodes = tuple(place.node_id for place in fact.tasks)
    move = Move(fact.attempt, nodes, fact.by, fact.reason, state.now_ms, state.token, tasks=fact.tasks)
    job.moves = replace(
        job.moves,
        latest=move,
        rebalanced=job.moves.rebalanced or fact.cause == "rebalance",
        migrations=job.moves.migrations + bool(fact.cause),
    )
    state.moving[job.order] = job
    for node_id in dict.fromkeys(nodes):
        node = state.nodes[node_id]
        node.reserved.add(job.job_id)
        keep(node, job)
        state.rebook(node)
    state.change_log.add(job.job_id)
    job.version += 1


def job_converged(state: CellState, fact: JobConverged) -> None:
    job = state.jobs[fact.job_id]
    job.moves = replace(job.moves, converged_ms=state.now_ms)
    job.version += 1


def move_given_up(state: CellState, fact: MoveGivenUp) -> None:
    job = state.jobs[fact.job_id]
    end_move(state, job, fact.reason)
    state.change_log.add(job.job_id)
    job.version += 1


def end_move(state: CellState, job: JobState, problem: str) -> None:
    """Frees what was reserved for the job, if anything was. `problem`: why it does not reach its target;
    empty: it takes its target now."""
    move = job.moves.latest
    if move is None or not move.tasks:
        return
    for node_id in dict.fromkeys(move.nodes):
        node = state.nodes[node_id]
        let_go(node, job)
        node.reserved.discard(job.job_id)
        state.rebook(node)
    move = replace(move, outcome="given_up" if problem else "arrived", problem=problem, tasks=())
    job.moves = replace(job.moves, latest=move)
    del state.moving[job.order]
