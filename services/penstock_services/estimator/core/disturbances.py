"""Follows under which conditions live jobs run: who comes to their GPUs and leaves them, changes of their cores, caps.

O(GPUs of the tasks that come or go, and jobs on them) per fact.
"""

from collections.abc import Iterable, Mapping

from penstock.model.adjustments import BandwidthDecided, CoresDecided
from penstock.model.types import TaskPlacement
from penstock_services.estimator.core.conditions import Conditions, Holders
from penstock_services.estimator.core.live import LiveJob


def came(
    live: Mapping[str, LiveJob], holders: Holders, job_id: str, places: Iterable[TaskPlacement], now_ms: int
) -> None:
    """Tasks of a live job have their places, and its progress is that of this attempt."""
    holders.take(job_id, places)
    job = live[job_id]
    for other in sorted({job_id, *holders.neighbours(job_id, job.workers)}):
        _meet(live, holders, other, now_ms)


def left(live: Mapping[str, LiveJob], holders: Holders, tasks: Iterable[str], now_ms: int) -> None:
    """These tasks hold nothing any more; those that already did not are passed over."""
    for other in sorted({job_id for task_id in tasks for job_id in holders.give_back(task_id)}):
        _meet(live, holders, other, now_ms)


def _meet(live: Mapping[str, LiveJob], holders: Holders, job_id: str, now_ms: int) -> None:
    job = live.get(job_id)
    if job is not None and job.progress is not None:
        neighbours = tuple(sorted(holders.neighbours(job_id, job.workers)))
        job.progress.meet(job.progress.conditions._replace(neighbours=neighbours), now_ms)


def adjusted(job: LiveJob, fact: CoresDecided | BandwidthDecided, now_ms: int) -> None:
    """As decided: a node that cannot obey leaves the step as it was, and less is learned than could be."""
    if job.progress is None or fact.task_id not in job.workers:
        return
    worker, before = list(job.workers).index(fact.task_id), job.progress.conditions
    job.progress.meet(_adjusted(before, worker, fact), now_ms)


def _adjusted(before: Conditions, worker: int, fact: CoresDecided | BandwidthDecided) -> Conditions:
    if isinstance(fact, CoresDecided):
        return before.with_cores(worker, len(fact.cores))
    return before.with_cap(worker, fact.memory_bandwidth_percent)
