"""Fold of co-location: which jobs hold parts of the same GPUs, or share whole ones as members of a group,
during each attempt.

The estimator continues from it after a snapshot, and learns step and run times from attempts that ran alone.
"""

from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement

Holders = dict[tuple[str, tuple[int, ...]], list[str]]
"""(Node id, GPUs) → ids of the jobs with a living task on one of these GPUs, possibly with duplicates.
Members of a group have equal GPUs."""


def neighbours(state: CellState, place: TaskPlacement, job_id: str, known: Holders) -> list[str]:
    """Ids of other jobs with a living task on one of these GPUs, possibly with duplicates. O(tasks of the
    node), where a GPU may be shared.

    `known`: holders that were found in the present state; those found here are added.
    """
    if not place.gpus or not _may_share(state.jobs[job_id], place):
        return []
    held = known.get((place.node_id, place.gpus))
    if held is None:
        held = known[place.node_id, place.gpus] = _holders(state, place)
    return [other for other in held if other != job_id]


def _holders(state: CellState, place: TaskPlacement) -> list[str]:
    apart, jobs = set(place.gpus).isdisjoint, state.jobs
    return [
        job_id
        for task_id, job_id in state.nodes[place.node_id].tasks.items()
        if not apart(jobs[job_id].tasks[task_id].place.gpus)
    ]


def changed(state: CellState, job: JobState, place: TaskPlacement) -> None:
    """A task has taken or released this place. O(tasks of the job and of the jobs that share GPUs with it);
    O(1) where none may."""
    if not _may_share(job, place):
        return
    known: Holders = {}
    others = dict.fromkeys(neighbours(state, place, job.job_id, known))
    for met in (job.job_id, *others) if others else ():
        _meet(state, state.jobs[met], known)


def _may_share(job: JobState, place: TaskPlacement) -> bool:
    return bool(job.sharing.group) or place.gpu_share_milli < WHOLE_GPU


def _meet(state: CellState, job: JobState, known: Holders) -> None:
    found = present(state, job, known)
    before = job.sharing
    if found != before.jobs:
        job.sharing = replace(before, jobs=found, since_ms=state.now_ms, ever=before.ever or bool(found))


def present(state: CellState, job: JobState, known: Holders) -> tuple[str, ...]:
    """`Sharing.jobs`, computed from the nodes. `known` as in `neighbours`."""
    found: set[str] = set()
    for task_id, task in job.tasks.items():
        if state.nodes[task.place.node_id].tasks.get(task_id) == job.job_id:
            found.update(neighbours(state, task.place, job.job_id, known))
    return tuple(sorted(found))
