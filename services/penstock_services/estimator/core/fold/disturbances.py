"""Tracks the run conditions of live jobs: jobs that come to their GPUs and leave them, changes of their
cores, bandwidth caps.

O(tasks on the nodes of a job that comes or goes, and of its neighbours) per fact.
"""

from collections.abc import Mapping
from math import nan

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement
from penstock_services.estimator.core.fold.live import LiveJob
from penstock_services.estimator.core.interference import Interference, Measured, kind_of
from penstock_services.estimator.core.records.conditions import Conditions


def came(cell: CellState, live: Mapping[str, LiveJob], job_id: str) -> None:
    """The job is placed, and its progress is that of this attempt."""
    neighbours = _neighbours(cell, cell.jobs[job_id])
    for other in sorted({job_id, *neighbours}) if neighbours else ():  # alone is how an attempt begins
        _meet(cell, live, other)


def left(cell: CellState, live: Mapping[str, LiveJob], place: TaskPlacement) -> None:
    """A worker holds this place no more."""
    for other in sorted(_holders(cell, place)):
        _meet(cell, live, other)


def measured(live: Mapping[str, LiveJob], learned: Interference, job: LiveJob) -> None:
    """An attempt is over: learns its step times alone, and beside each other job that still lives. A pair is
    learned when the first of the two jobs ends."""
    progress = job.progress
    if progress is None or not _one_gpu(job):
        return
    learned.alone(kind_of(job.info, progress.gpu), progress.undisturbed.mean_ms)
    for conditions in list(progress.windows_of) if _has_a_share(job) else ():
        if len(conditions.neighbours) != 1:
            continue
        other_id = conditions.neighbours[0]
        other = live.get(other_id)
        if other is not None and _one_gpu(other) and _has_a_share(other):
            mine, its = _beside(job, other_id), _beside(other, job.job.job_id)
            if its is not None:
                learned.alone(its.kind, its.alone_ms)
            if mine is not None and its is not None and mine.kind.gpu_model == its.kind.gpu_model:
                learned.together(mine, its)


def _one_gpu(job: LiveJob) -> bool:
    """Whether it is one task with one GPU of a known model, or a part of it, and its network is named."""
    known = job.info.model is not None and job.progress is not None and job.progress.gpu
    return bool(known) and len(job.workers) == 1 and job.allocation is not None and job.allocation.gpus == 1


def _has_a_share(job: LiveJob) -> bool:
    """Members of a group do not: they use whole GPUs in turns, which gives no information about jobs that
    compute at once."""
    return job.allocation is not None and job.allocation.gpu_share_milli < WHOLE_GPU


def _beside(job: LiveJob, other_id: str) -> Measured | None:
    """Its step times alone, and while it shared its GPU with this job only and was otherwise as placed; None:
    it has not run."""
    progress = job.progress
    if progress is None:
        return None
    windows = progress.windows_of.get(progress.placed._replace(neighbours=(other_id,)))
    beside_ms = nan if windows is None else windows.mean_ms
    return Measured(kind_of(job.info, progress.gpu), progress.undisturbed.mean_ms, beside_ms)


def _meet(cell: CellState, live: Mapping[str, LiveJob], job_id: str) -> None:
    progress = live[job_id].progress
    if progress is not None:
        neighbours = tuple(sorted(_neighbours(cell, cell.jobs[job_id])))
        progress.meet(progress.conditions._replace(neighbours=neighbours), cell.now_ms)


def _neighbours(cell: CellState, job: JobState) -> set[str]:
    """Other jobs on the GPUs of its living workers."""
    living = (task.place for task in job.tasks.values() if task.status is not TaskStatus.EXITED)
    found = {other for place in living if place.role == "worker" for other in _holders(cell, place)}
    return found - {job.job_id}


def _holders(cell: CellState, place: TaskPlacement) -> set[str]:
    """Jobs of which a living worker has one of these GPUs, whole or in part. O(tasks of the node)."""
    found: set[str] = set()
    if place.gpus:
        apart = set(place.gpus).isdisjoint
        for task_id, job_id in cell.nodes[place.node_id].tasks.items():
            other = cell.jobs[job_id].tasks[task_id].place
            if other.role == "worker" and not apart(other.gpus):
                found.add(job_id)
    return found


def adjusted(job: LiveJob, fact: CoresDecided | BandwidthDecided, now_ms: int) -> None:
    """Applied as decided: where a node cannot obey, the step stays as it was,
    and less is learned than could be."""
    if job.progress is None or fact.task_id not in job.workers:
        return
    worker, before = list(job.workers).index(fact.task_id), job.progress.conditions
    job.progress.meet(_adjusted(before, worker, fact), now_ms)
    if isinstance(fact, CoresDecided) and fact.cause == "settled":
        job.progress.settle(worker, len(fact.cores))


def _adjusted(before: Conditions, worker: int, fact: CoresDecided | BandwidthDecided) -> Conditions:
    if isinstance(fact, CoresDecided):
        return before.with_cores(worker, len(fact.cores))
    return before.with_cap(worker, fact.memory_bandwidth_percent)
