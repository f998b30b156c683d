"""Validation of adjustments: whether a running task's cores or memory bandwidth may be changed as proposed,
on exactly this state; and its resulting cores."""

from typing import NamedTuple

from penstock.cluster.reasons import Refusal, frozen
from penstock.ledger.derived.groups import others
from penstock.ledger.derived.succession import followers
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.fold.plans import reserved_nodes
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.masks import full_mask, mask_of, take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import (
    MAX_CORE_CHANGES,
    MAX_CORE_PROBES,
    MAX_THROTTLES,
    AdjustmentCause,
)
from penstock.model.nouns.transitions import NodeStatus, TaskStatus
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.scheduling.profiles import known_profile

Adjusting = CoresProposed | ThrottleProposed


class Running(NamedTuple):
    """A task that may be adjusted."""

    job: JobState
    task: TaskState
    node: NodeState


def running(state: CellState, task_id: str) -> Running | Refusal:
    """The task, if it runs on a Ready node. O(1)."""
    job = state.jobs.get(task_id.rsplit(".", 2)[0])
    task = None if job is None else job.tasks.get(task_id)
    if job is None or task is None:
        return Refusal("unknown_job", f"{task_id} is not a task of a running job")
    node = state.nodes[task.place.node_id]
    if task.status is not TaskStatus.RUNNING or job_of_task(state, task.place.node_id, task_id) is not job:
        return Refusal("wrong_state", f"{task_id} is {task.status}, not running")
    if next_jobs := followers(state, job):
        return Refusal(
            "wrong_state", f"{job.job_id} is about to end, and {', '.join(next_jobs)} gets its cores"
        )
    if node.status is not NodeStatus.READY:
        return Refusal("wrong_state", f"{task_id} runs on {task.place.node_id}, which is {node.status}")
    return Running(job, task, node)


def refused(state: CellState, proposal: Adjusting) -> Refusal | None:
    """The refusal of an adjustment; None: it can be made."""
    if (still := frozen(state)) is not None:
        return still
    found = running(state, proposal.task_id)
    if isinstance(found, Refusal):
        return found
    node_id = found.task.place.node_id
    if not proposal.by:
        wrong = _slows_training(state, found, proposal) or _adjusted_enough(found, proposal)
        if wrong is not None:
            return Refusal("wrong_state", f"{proposal.task_id} {wrong}")
    if isinstance(proposal, ThrottleProposed):
        if found.node.spec.bandwidth_cap == "none":
            return Refusal(
                "unsupported",
                f"{node_id} cannot cap memory bandwidth: it has neither resctrl nor quotas of processor time "
                "that it can use",
            )
        return None
    if proposal.cores > len(found.task.place.cores) and node_id in reserved_nodes(state):
        return Refusal("infeasible", f"the free part of {node_id} is reserved for a proposed plan")
    room = usable_cores(state, found)
    if proposal.cores > room:
        free = found.node.free_core_mask.bit_count()
        return Refusal(
            "infeasible",
            f"{proposal.task_id} has {len(found.task.place.cores)} cores and {node_id} {free} free: it can "
            f"have {room} at most",
        )
    return None


def cause_of(proposal: Adjusting) -> AdjustmentCause:
    """Cause of the decision: a service that names none is bounded like one that does;
    an operator has no cause."""
    return "" if proposal.by else proposal.cause or "other"


def _slows_training(state: CellState, found: Running, proposal: Adjusting) -> str | None:
    """Why a service may not make this change of a job with GPUs, whatever the cause that it names. Fewer
    cores than its placement's: only by a search."""
    if not any(one.place.gpus for one in found.job.tasks.values()):
        return None
    if isinstance(proposal, ThrottleProposed):
        slows = (proposal.memory_bandwidth_percent or 100) < 100
    else:
        least = min(found.task.cores.placed, len(found.task.place.cores))
        slows = proposal.cores < least and not _searched(state, found, proposal)
    if slows or proposal.cause == "contention":
        return f"belongs to {found.job.job_id}, which has GPUs: jobs with GPUs are not slowed"
    return None


def _searched(state: CellState, found: Running, proposal: CoresProposed) -> bool:
    """Whether these cores are within the bounds of the profile's search for the task's cores: a probe, or the
    end of a search that has probed."""
    job, task, _ = found
    if not (proposal.cause == "probe" or (proposal.cause == "settled" and task.cores.probes)):
        return False
    profile = known_profile(state.settings)
    guard = None if profile is None else profile.guard
    if guard is None or guard.step_of(job) is None or not task.place.gpus:
        return False
    gpus = max(len(one.place.gpus) for one in job.tasks.values())
    return proposal.cores >= guard.least_of(job, task.cores.placed, gpus)


def _adjusted_enough(found: Running, proposal: Adjusting) -> str | None:
    """Why a service may not make this change (again), whatever it has measured. Giving back is always
    allowed: the change that took it was counted."""
    task, cause = found.task, cause_of(proposal)
    if renews(found, proposal):
        return None
    if isinstance(proposal, ThrottleProposed):
        return None if proposal.memory_bandwidth_percent is None else _throttled_enough(found.job)
    cores = len(task.used_cores)
    if cause == "contention":
        return (
            f"has {cores} cores: slowing it means fewer"
            if proposal.cores >= cores
            else _throttled_enough(found.job)
        )
    if cause == "released":
        within = cores < proposal.cores <= task.cores.throttled_from
        return (
            None
            if within
            else f"has {cores} cores, and had {task.cores.throttled_from or cores} before it was slowed"
        )
    if cause == "probe" and found.job.sharing.group:
        return "is a member of a group, whose cores are held together"
    if cause in ("probe", "settled") and task.cores.settled:
        return "has its final cores already: a search runs once per attempt"
    if cause == "probe" and task.cores.probes >= MAX_CORE_PROBES:
        return (
            f"was tried with {task.cores.probes} numbers of cores: no more than {MAX_CORE_PROBES} are allowed"
        )
    if cause != "probe" and proposal.cores in (cores, task.cores.placed):
        return None
    times = found.job.adjustments.core_changes
    if times >= MAX_CORE_CHANGES * found.job.spec.workers:
        return f"belongs to a job whose cores services have changed {times} times: no more are allowed"
    return None


def renews(found: Running, proposal: Adjusting) -> bool:
    """Whether a service proposes the throttle that the task has: then the throttle lasts on, and is not
    counted again."""
    task = found.task
    if cause_of(proposal) != "contention":
        return False
    if isinstance(proposal, ThrottleProposed):
        return proposal.memory_bandwidth_percent == task.memory_bandwidth_percent is not None
    return proposal.cores == len(task.used_cores) < task.cores.throttled_from


def _throttled_enough(job: JobState) -> str | None:
    if (times := job.adjustments.throttles) < MAX_THROTTLES * job.spec.workers:
        return None
    return f"belongs to a job that services have slowed {times} times: no more are allowed"


def usable_cores(state: CellState, found: Running) -> int:
    """How many cores the task could have: its own, as far as the node still has them, those of its group
    there, and the free ones."""
    mine = _own(found) | _groups(state, found)
    return mine.bit_count() + found.node.free_core_mask.bit_count()


def cores_of(state: CellState, found: Running, count: int) -> tuple[int, ...]:
    """`count` ≤ `usable_cores` cores: first its own, then its group's, then free ones,
    each lowest first; ascending."""
    own = _own(found)
    chosen: tuple[int, ...] = ()
    for mask in (own, _groups(state, found) & ~own, found.node.free_core_mask):
        chosen += take_lowest(mask, min(count - len(chosen), mask.bit_count()))
    return tuple(sorted(chosen))


def _groups(state: CellState, found: Running) -> int:
    beside = others(state, found.job, found.task.place.rank)
    return mask_of(tuple(core for place in beside for core in place.cores)) & full_mask(found.node.spec.cores)


def _own(found: Running) -> int:
    return mask_of(found.task.place.cores) & full_mask(found.node.spec.cores)
