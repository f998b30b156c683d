"""The invariants of groups: members hold the same GPUs on the same nodes, rank by rank, and no other job
holds any of them.

They are computed from the places alone, without what the fold books (`penstock.ledger.derived.groups`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.ledger.derived.succession import awaited
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement


class Lease(NamedTuple):
    """What one task, or the tasks of one rank of a group together, may use of a node."""

    holder: str
    gpus: frozenset[int]
    cores: frozenset[int]
    host_memory_mib: int
    gpu_memory_mib: int
    bandwidth_mbps: int
    gpu_share_milli: int


def lease_of(places: Sequence[TaskPlacement]) -> Lease:
    """The lease of one task alone, or of tasks that share GPUs."""
    return Lease(
        " with ".join(place.task_id for place in places),
        frozenset(gpu for place in places for gpu in place.gpus),
        frozenset(core for place in places for core in place.cores),
        sum(place.host_memory_mib for place in places),
        sum(place.gpu_memory_mib for place in places),
        max(place.bandwidth_mbps for place in places),
        places[0].gpu_share_milli,
    )


def leases_on(state: CellState, node: NodeState) -> list[Lease]:
    """The leases of all tasks on the node; a task without a live job is skipped."""
    held: dict[tuple[str, int], list[TaskPlacement]] = {}
    for task_id, job_id in node.tasks.items():
        job = state.jobs.get(job_id)
        if job is not None and task_id in job.tasks:
            place = _not_yet(state, job, job.tasks[task_id].place)
            group = job.sharing.group
            held.setdefault((group, place.rank) if group else (task_id, -1), []).append(place)
    return [lease_of(places) for places in held.values()]


def _not_yet(state: CellState, job: JobState, place: TaskPlacement) -> TaskPlacement:
    """What a task that starts after others takes beyond what those of them that still live hold."""
    living = [
        task.place
        for other_id in job.succession.after
        if other_id in state.jobs and state.jobs[other_id].token < job.token
        for task in state.jobs[other_id].tasks.values()
        if task.status is not TaskStatus.EXITED and task.place.node_id == place.node_id
    ]
    before = [other for other in living if set(other.gpus) & set(place.gpus)]
    gpus = {gpu for other in before for gpu in other.gpus}
    cores = {core for other in before for core in other.cores}
    return replace(
        place,
        gpus=tuple(gpu for gpu in place.gpus if gpu not in gpus),
        cores=tuple(core for core in place.cores if core not in cores),
    )


def group_problems(state: CellState) -> Iterator[str]:
    named: dict[str, dict[str, JobState]] = {}
    for job in state.jobs.values():
        if job.sharing.group:
            named.setdefault(job.sharing.group, {})[job.job_id] = job
    for job in state.jobs.values():
        for other_id in awaited(state, job):
            if job.status not in HOLDING or job.sharing.group or state.jobs[other_id].sharing.group:
                yield f"job {job.job_id} is {job.status}, and starts after {other_id}"
        if job.status is JobStatus.RUNNING and awaited(state, job):
            yield f"job {job.job_id} runs on GPUs of {', '.join(awaited(state, job))}, which have not ended"
    if state.groups != named:
        yield f"groups are listed as {_ids(state.groups)}, members name {_ids(named)}"
    for group_id, members in named.items():
        if not 2 <= len(members) <= MAX_GROUP_MEMBERS:
            yield f"group {group_id} has {len(members)} members: {', '.join(members)}"
        for job in members.values():
            if job.status not in HOLDING:
                yield f"job {job.job_id} is {job.status} and in group {group_id}"
        yield from _alike(state, group_id, list(members.values()))


def _alike(state: CellState, group_id: str, members: list[JobState]) -> Iterator[str]:
    first, *more = members
    for job in more:
        if _held(job) != _held(first):
            yield f"group {group_id}: {job.job_id} holds {_held(job)}, {first.job_id} {_held(first)}"
    for tasks in zip(*(job.tasks.values() for job in members), strict=False):
        living = [task.place for task in tasks if task.status is not TaskStatus.EXITED]
        for place in living:
            if place.gpu_share_milli != WHOLE_GPU:
                yield f"task {place.task_id} has a part of a GPU and is in group {group_id}"
        if not living or not living[0].gpus:
            continue
        node = state.nodes[living[0].node_id]
        room_mib = min((gpu.memory_mib for gpu in node.spec.gpus), default=0)
        promised_mib = sum(place.gpu_memory_mib for place in living)
        if promised_mib > room_mib and set(living[0].gpus) <= set(range(len(node.spec.gpus))):
            who = " and ".join(place.task_id for place in living)
            yield f"group {group_id}: {who} are promised {promised_mib} MiB of a GPU with {room_mib}"


def _held(job: JobState) -> list[tuple[str, tuple[int, ...]]]:
    return [(task.place.node_id, task.place.gpus) for task in job.tasks.values()]


def _ids(groups: dict[str, dict[str, JobState]]) -> dict[str, list[str]]:
    return {group_id: sorted(members) for group_id, members in groups.items()}
