"""Places of tasks: GPU ids, cores and caps on a node, lowest free first."""

import msgspec

from penstock.ledger.derived.memory import cap_of
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.model.decisions.ledger_events import PlacementExplanation
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, Role, TaskPlacement


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Placement of a whole gang."""

    nodes: tuple[str, ...]
    """Node id per task in rank order: workers 0 … w−1, then parameter servers."""
    explanation: PlacementExplanation
    gpus: tuple[tuple[int, ...], ...] | None = None
    """The GPUs of each task in rank order, if the policy chooses them; else `assign` chooses them."""
    borrows: bool = False
    """See `PlacementDecided.borrows`."""


def task_id_of(job: JobState, rank: int) -> str:
    """The id of this rank's task in the job's next attempt: `job.attempt.w0`, …, `job.attempt.ps0`, …"""
    workers = job.workers
    role = f"w{rank}" if rank < workers else f"ps{rank - workers}"
    return f"{job.job_id}.{job.attempt + 1}.{role}"


def place_on(
    node: NodeState,
    job: JobState,
    demand: Demand,
    rank: int,
    gpus: tuple[int, ...] | None = None,
    core_mask: int | None = None,
) -> TaskPlacement:
    """The place of one task of the job's next attempt on a node that can take it. `gpus`: None where they are
    chosen here; `core_mask`: it gets the lowest of these cores, None: of the node's free ones.

    A share is placed on the partly allocated GPU with the least free that holds it (best fit; ties: the
    lowest index), else on the lowest wholly free one.
    """
    role: Role = "worker" if rank < demand.workers else "ps"
    need = demand.worker if role == "worker" else demand.parameter_server
    if gpus is None and need.gpu_share_milli == WHOLE_GPU:
        gpus = _whole(node, job, need.gpus)
    elif gpus is None:
        gpus = (_share(node, need),)
    return TaskPlacement(
        task_id=task_id_of(job, rank),
        role=role,
        rank=rank,
        node_id=node.spec.node_id,
        gpus=gpus,
        cores=take_lowest(node.free_core_mask if core_mask is None else core_mask, need.cores),
        host_memory_mib=need.host_memory_mib,
        gpu_memory_mib=need.gpu_memory_mib if need.gpus else 0,
        bandwidth_mbps=need.bandwidth_mbps,
        gpu_share_milli=need.gpu_share_milli,
        host_memory_cap_mib=cap_of(node, job, need, role),
    )


def _whole(node: NodeState, job: JobState, count: int) -> tuple[int, ...]:
    """The lowest free GPUs, without those on which attempts failed, if there are enough."""
    free = node.healthy_gpu_mask
    failed = job.retries.failed_on.get(node.spec.node_id, 0) if job.retries.failed_on else 0
    if node.distrust is not None:
        failed |= node.distrust.failed_gpu_mask
    if failed and (free & ~failed).bit_count() >= count:
        free &= ~failed
    return take_lowest(free, count)


def _share(node: NodeState, need: ResourceVector) -> int:
    """The GPU for a share."""
    held = [
        (share, gpu)
        for gpu, share in node.offered.items()
        if share.holds(need) and not node.unusable_gpu_mask >> gpu & 1
    ]
    return min(held)[1] if held else take_lowest(node.healthy_gpu_mask, 1)[0]
