"""Out-of-memory handling: memory caps of tasks, which job may retry with more memory, and the failure text
with its remedy.

What a user asks for is promised and is the cap. What is estimated is promised, too, and no cap (decision
136): the task may use what its node has free, and where the machine runs short the kernel ends it first. Then
the promise is raised (`raisable`).
"""

from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TaskExited
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import MAX_TEXT, WHOLE_GPU, ResourceVector, TaskPlacement

MAX_RAISES = 12  # out-of-memory attempts of one job; doublings from 8 GiB to the largest machines are fewer
MAX_SOURCE = 400  # characters of the estimate's source in a failure's text
NEAR_CAP = 0.9  # a task that had so much of its cap ran into it: the kernel counts in pages and batches
HOST, GPU = "host_memory", "gpu_memory"
KERNEL_KILL = "out_of_memory"
"""Cause of a task that the kernel killed for its host memory;
earlier versions report no other memory failure."""


def fair_share_mib(node: NodeSpec, need: ResourceVector) -> int:
    """The part of a node's host memory in proportion to the task's part of its GPUs, or of its cores for a
    task without GPUs."""
    if need.gpus and node.gpus:
        return node.host_memory_mib * need.gpus * need.gpu_share_milli // (len(node.gpus) * WHOLE_GPU)
    return node.host_memory_mib * need.cores // node.cores


def cap_of(node: NodeState, job: JobState, need: ResourceVector, role: str) -> int:
    """Value of `TaskPlacement.host_memory_cap_mib`: 0 where the reserved memory itself is the cap, as the
    user asked.

    Ideal: what a task may use is reserved for it. Departure: beyond an estimate, what the node can give now
    is a limit and not a reservation, as in Kubernetes' burstable pods, so that an estimate costs neither the
    task its life nor others their places. Never less than the fair share: others' estimates are no request,
    either.
    """
    if not need.host_memory_mib or asked_for(job, role, HOST):
        return 0
    cap_mib = min(max(node.free_host_memory_mib, fair_share_mib(node.spec, need)), node.spec.host_memory_mib)
    return cap_mib if cap_mib > need.host_memory_mib else 0


def asked_for(job: JobState, role: str, memory: str) -> bool:
    """Whether the user set this limit; users cannot set a parameter server's."""
    asked = job.spec.resources
    named = asked.gpu_memory_mib if memory == GPU else asked.host_memory_mib
    return role == "worker" and named is not None


def outgrown_mib(cap_mib: int, promised_mib: int, fact: TaskExited) -> int:
    """Host memory that a task had when it ran out of it: its cap; less where the kernel killed it before,
    since its node ran short."""
    used_mib = fact.usage.host_memory_mib
    if fact.cause != KERNEL_KILL or used_mib is None:
        return cap_mib
    return min(cap_mib, max(promised_mib, used_mib))


def raisable(state: CellState, job: JobState) -> bool:
    """Whether the attempt ran out of guessed memory, had more of it than the previous attempt, and some node
    has more still."""
    if job.retries.memory >= MAX_RAISES:
        return False
    return any(
        _more_exists(state, job, task)
        for task in job.tasks.values()
        if task.exit.exhausted and not asked_for(job, task.place.role, task.exit.exhausted)
    )


def _more_exists(state: CellState, job: JobState, task: TaskState) -> bool:
    place, allowed = task.place, job.spec.gpu_models
    here = state.nodes[place.node_id]
    if task.exit.exhausted == HOST and not place.cap_mib:
        return False
    had_mib = limit_mib(here, task, task.exit.exhausted)
    if had_mib <= job.retries.short_of.get(short_key(place, task.exit.exhausted), 0):
        return False
    return any(
        (node.spec.host_memory_mib if task.exit.exhausted == HOST else node.gpu_memory_mib) > had_mib
        for node in state.nodes.values()
        if node.status is not NodeStatus.GONE
        and len(node.spec.gpus) >= len(place.gpus)
        and (not place.gpus or all(allows(allowed, gpu.model) for gpu in node.spec.gpus))
    )


def short_key(place: TaskPlacement, memory: str) -> str:
    """A key of `Retries.short_of`."""
    return f"{place.role}:{memory}"


def limit_mib(node: NodeState, task: TaskState, memory: str) -> int:
    """The task's limit of this memory, or what it had of it when it ran out."""
    return gpu_limit_mib(node, task) if memory == GPU else task.exit.outgrown_mib or task.place.cap_mib


def gpu_limit_mib(node: NodeState, task: TaskState) -> int:
    """The task's limit of GPU memory: all of its GPU, or the part reserved on a shared GPU. Members of a
    group share whole GPUs, but not for all of their time, so their node reports the limit under which they
    ended."""
    if task.exit.gpu_limit_mib:
        return task.exit.gpu_limit_mib
    return node.gpu_memory_mib if task.place.gpu_share_milli == WHOLE_GPU else task.place.gpu_memory_mib


def failure_text(node: NodeState, job: JobState, task: TaskState, fact: TaskExited) -> str:
    """What failed, the limit and its origin, the measured use, and how to ask for more;
    at most MAX_TEXT characters."""
    place = task.place
    how = f" ({fact.detail})" if fact.detail else ""
    head = (
        f"{place.task_id} on {fact.node_id}: out of {'GPU' if fact.exhausted == GPU else 'host'} memory{how}"
    )
    limit = _gpu_limit(node, job, task) if fact.exhausted == GPU else _host_limit(node, job, task)
    used_mib = fact.usage.gpu_memory_mib if fact.exhausted == GPU else fact.usage.host_memory_mib
    measured = "" if used_mib is None else f"; measured peak {used_mib} MiB"
    return f"{head}; {limit}{measured}. {_remedy(node, task, fact.exhausted)}"[:MAX_TEXT]


def _host_limit(node: NodeState, job: JobState, task: TaskState) -> str:
    place = task.place
    if not place.cap_mib:
        return "it had no cap, so the machine itself ran short"
    if 0 < task.exit.outgrown_mib < NEAR_CAP * place.cap_mib:
        had = (
            f"its node ran short while it had {task.exit.outgrown_mib} MiB, and was promised "
            f"{place.host_memory_mib} MiB"
        )
        return f"{had}: {_origin(job, place, HOST)}"
    cap = f"its cap was {place.cap_mib} MiB"
    if place.cap_mib >= node.spec.host_memory_mib:
        cap += ", all that its node has"
    elif place.host_memory_cap_mib:
        cap += f", what its node could give beyond the {place.host_memory_mib} MiB that it was promised"
    return f"{cap}: {_origin(job, place, HOST)}"


def _gpu_limit(node: NodeState, job: JobState, task: TaskState) -> str:
    place, had_mib = task.place, gpu_limit_mib(node, task)
    if place.gpu_share_milli == WHOLE_GPU and not task.exit.gpu_limit_mib:
        model = node.spec.gpus[0].model if node.spec.gpus else "GPU"
        return f"it had all {had_mib} MiB of its {model}: {_origin(job, place, GPU)}"
    had = "it was promised" if had_mib == place.gpu_memory_mib else "its limit was"
    return f"{had} {had_mib} MiB of a shared GPU: {_origin(job, place, GPU)}"


def _origin(job: JobState, place: TaskPlacement, memory: str) -> str:
    if asked_for(job, place.role, memory):
        return "the job asked for it"
    if place.role == "ps":
        return "Penstock's guess for parameter servers"
    found = job.estimate
    if found is None:
        return "Penstock's guess"
    return f"Penstock's estimate, {found.confidence:.0%} sure, tier {found.tier}: {found.source[:MAX_SOURCE]}"


def _remedy(node: NodeState, task: TaskState, memory: str) -> str:
    if task.place.role == "ps":
        return (
            "A parameter server's memory cannot be asked for; each attempt that ends so is followed by "
            "one with more"
        )
    had_mib = limit_mib(node, task, memory)
    more = _round_gib(2 * had_mib) if had_mib else "16GiB"
    smaller = "; or use a smaller batch" if memory == GPU else ""
    flag = memory.replace("_", "-")
    return f"Ask for more with --{flag} {more}, or in the job file: resources: {{{memory}: {more}}}{smaller}"


def _round_gib(mib: int) -> str:
    """Text for the command line: whole GiB, rounded up, for 1 GiB and more."""
    return f"{-(-mib // 1_024)}GiB" if mib >= 1_024 else f"{mib}MiB"
