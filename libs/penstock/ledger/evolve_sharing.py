"""Fold of co-location: which jobs hold parts of the same GPUs, or share whole ones as members of a group, during each attempt.

The estimator continues from it after a snapshot, and learns step and run times from attempts that ran alone.
"""

from collections.abc import Sequence

from penstock.ledger.job_state import JobState
from penstock.ledger.sharing import Sharing
from penstock.ledger.state import CellState
from penstock.model.types import WHOLE_GPU, TaskPlacement


def neighbours(state: CellState, place: TaskPlacement, job_id: str) -> Sequence[str]:
    """Ids of other jobs with a living task on one of these GPUs, possibly with duplicates. O(tasks of the node), where a GPU may be shared."""
    if not place.gpus or not _may_share(state.jobs[job_id], place):
        return ()
    apart, jobs = set(place.gpus).isdisjoint, state.jobs
    return [
        other
        for task_id, other in state.nodes[place.node_id].tasks.items()
        if other != job_id and not apart(jobs[other].tasks[task_id].place.gpus)
    ]


def changed(state: CellState, job: JobState, place: TaskPlacement) -> None:
    """A task has taken or released this place. O(tasks of the job and of the jobs that share GPUs with it); O(1) where none may."""
    if not _may_share(job, place):
        return
    others = dict.fromkeys(neighbours(state, place, job.job_id))
    for met in (job.job_id, *others) if others else ():
        _meet(state, state.jobs[met])


def _may_share(job: JobState, place: TaskPlacement) -> bool:
    return bool(job.group) or place.gpu_share_milli < WHOLE_GPU


def _meet(state: CellState, job: JobState) -> None:
    found = present(state, job)
    if found != job.sharing.jobs:
        job.sharing = Sharing(found, state.now_ms, job.sharing.ever or bool(found))


def present(state: CellState, job: JobState) -> tuple[str, ...]:
    """`Sharing.jobs`, computed from the nodes."""
    found: set[str] = set()
    for task_id, task in job.tasks.items():
        if state.nodes[task.place.node_id].tasks.get(task_id) == job.job_id:
            found.update(neighbours(state, task.place, job.job_id))
    return tuple(sorted(found))
