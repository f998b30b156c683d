"""Whether a proposal may be accepted on this very state. Proposers and the placer call the same function (LAW 1).

Conflicts are fine-grained: only the versions that a proposal names are compared, and every plan is checked
against what is really free, one after the other on one overlay. All or nothing.
"""

from typing import Literal, NamedTuple

from penstock.ledger.masks import mask_of
from penstock.ledger.state import CellState, JobState, NodeState
from penstock.model.proposals import JobPlan, PlanProposed, Proposal
from penstock.model.transitions import JobStatus, NodeStatus
from penstock.model.types import WHOLE_GPU, ResourceVector, TaskPlacement
from penstock.policies.base import task_id_of

RefusalReason = Literal["", "stale", "infeasible", "unknown_job", "wrong_state", "unsupported", "invalid"]
"""As in `ProposalAnswered`."""


class Verdict(NamedTuple):
    """The answer to a proposal; `reason` is empty iff accepted."""

    accepted: bool
    reason: RefusalReason
    detail: str


ACCEPTED = Verdict(True, "", "")


def _refused(reason: RefusalReason, detail: str) -> Verdict:
    return Verdict(False, reason, detail)


def validate(state: CellState, proposal: Proposal) -> Verdict:
    """Judges batch plans; other proposals are `unsupported`. Never changes the state."""
    if not isinstance(proposal, PlanProposed):
        return _refused("unsupported", f"{proposal.TYPE} is not acted on by this placer")
    if proposal.kind != "batch":
        return _refused("unsupported", f"plans of kind {proposal.kind} are not acted on by this placer")
    if len({plan.job_id for plan in proposal.plans}) < len(proposal.plans):
        return _refused("invalid", "a job is planned twice")
    if state.frozen:
        return _refused("wrong_state", f"the cell is frozen: {state.frozen}")
    stale = _stale(state, proposal)
    if stale is not None:
        return stale
    left: dict[str, NodeState] = {}
    for plan in proposal.plans:
        verdict = _plan(state, plan, left)
        if verdict is not None:
            return verdict
    return ACCEPTED


def _stale(state: CellState, proposal: Proposal) -> Verdict | None:
    """A version that the proposal was computed from has moved on."""
    for read in proposal.read:
        held: JobState | NodeState | None = (
            state.jobs.get(read.id) if read.kind == "job" else state.nodes.get(read.id)
        )
        if held is None:
            return _refused("stale", f"{read.kind} {read.id} is not known any more")
        if held.version != read.version:
            return _refused(
                "stale", f"{read.kind} {read.id} was read at {read.version}, is at {held.version}"
            )
    return None


def _plan(state: CellState, plan: JobPlan, left: dict[str, NodeState]) -> Verdict | None:
    """One job's plan: the job may be placed, the plan is its whole gang, and every task fits."""
    job = state.jobs.get(plan.job_id)
    if job is None:
        outcome = state.ended.get(plan.job_id)
        return _refused(
            "unknown_job", f"{plan.job_id} " + (f"has ended: {outcome}" if outcome else "is unknown")
        )
    if job.status is not JobStatus.QUEUED:
        return _refused("wrong_state", f"{job.job_id} is {job.status}, not queued")
    if job.held is not None:
        return _refused("wrong_state", f"{job.job_id} is held")
    demand = job.demand
    if len(plan.tasks) != demand.tasks:
        return _refused(
            "invalid", f"{job.job_id} has {demand.tasks} tasks, the plan places {len(plan.tasks)}"
        )
    for rank, (place, need) in enumerate(zip(plan.tasks, demand.needs(), strict=True)):
        wrong = _not_the_task(job, rank, place, need)
        if wrong:
            return _refused("invalid", f"{place.task_id}: {wrong}")
        lacking = _take(state, place, need, demand.gpu_models, left)
        if lacking:
            return _refused("infeasible", f"{place.task_id} on {place.node_id}: {lacking}")
    return None


def _not_the_task(job: JobState, rank: int, place: TaskPlacement, need: ResourceVector) -> str:
    """What makes this place differ from the task that the job's next attempt has at this rank."""
    expected = task_id_of(job, rank)
    role = "worker" if rank < job.spec.workers else "ps"
    if (place.task_id, place.rank, place.role) != (expected, rank, role):
        return f"expected {role} {expected} at rank {rank}"
    if len(set(place.gpus)) != len(place.gpus) or len(set(place.cores)) != len(place.cores):
        return "a GPU or core is named twice"
    gives = (
        len(place.gpus),
        len(place.cores),
        place.host_memory_mib,
        place.gpu_memory_mib,
        place.bandwidth_mbps,
        place.gpu_share_milli,
    )
    asks = (
        need.gpus,
        need.cores,
        need.host_memory_mib,
        need.gpu_memory_mib if need.gpus else 0,
        need.bandwidth_mbps,
        need.gpu_share_milli,
    )
    if gives != asks:
        return f"gives (GPUs, cores, MiB, GPU MiB, Mbit/s, share) {gives}, needed are {asks}"
    return ""


def _take(
    state: CellState,
    place: TaskPlacement,
    need: ResourceVector,
    gpu_models: tuple[str, ...],
    left: dict[str, NodeState],
) -> str:
    """Takes the task's resources off the overlay; returns what is lacking, if anything is."""
    node = state.nodes.get(place.node_id)
    if node is None:
        return "no such node"
    if node.status is not NodeStatus.READY:
        return f"the node is {node.status}"
    if not state.index.eligible(need, gpu_models) & node.bit:
        return "its GPUs are of another model or have too little memory"
    here = left.get(place.node_id)
    if here is None:
        here = left[place.node_id] = node.copy()
    if place.gpu_share_milli < WHOLE_GPU:
        [gpu] = place.gpus
        share = here.left_of(gpu)
        if share is None:
            return f"GPU {gpu} is not free"
        if not share.holds(need):
            return f"GPU {gpu} has {share.milli}/1000 and {share.memory_mib} MiB left"
    elif mask_of(place.gpus) & ~here.healthy_gpu_mask:
        return f"of GPUs {place.gpus} some are not free"
    if mask_of(place.cores) & ~here.free_core_mask:
        return f"of cores {place.cores} some are not free"
    if place.host_memory_mib > here.free_host_memory_mib:
        return f"{here.free_host_memory_mib} MiB of memory are free, {place.host_memory_mib} needed"
    if place.bandwidth_mbps > here.free_bandwidth_mbps:
        return f"{here.free_bandwidth_mbps} Mbit/s are free, {place.bandwidth_mbps} needed"
    here.give(place)
    return ""
