"""Succession on GPUs: a task is placed on GPUs of tasks that are being stopped or about to end, and starts
when these have ended.

Its order reaches the node before that (`PlacementDecided.after`), and the node delays its start while a task
holds one of its GPUs. GPUs and cores that both have are booked once; memory and bandwidth are booked for
both, so that the order in which several predecessors end does not matter.
"""

from collections.abc import Container, Iterator, Sequence

from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import mask_of, without
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import TaskPlacement


def beyond(place: TaskPlacement, beside: Sequence[TaskPlacement]) -> TaskPlacement:
    """The place without the GPUs and cores of `beside`; unchanged if that is empty."""
    if not beside:
        return place
    gpus, cores = units_beyond(place, beside)
    return replace(place, gpus=gpus, cores=cores)


def units_beyond(
    place: TaskPlacement, beside: Sequence[TaskPlacement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """GPUs and cores of the place that none of `beside` has."""
    gpus = cores = 0
    for other in beside:
        gpus |= mask_of(other.gpus)
        cores |= mask_of(other.cores)
    return without(place.gpus, gpus), without(place.cores, cores)


def comes_after(one: JobState, other: JobState) -> bool:
    """Whether `one` starts when the attempt of `other` that was placed before it has ended. A later attempt
    of `other` may itself start after `one`."""
    return other.job_id in one.succession.after and other.token < one.token


def follow(one: JobState, other: JobState) -> bool:
    """Whether either of the two starts when the other has ended."""
    return comes_after(one, other) or comes_after(other, one)


def meet(one: TaskPlacement, other: TaskPlacement) -> bool:
    """Whether two places on one node have a GPU in common."""
    return not set(one.gpus).isdisjoint(other.gpus)


def successors(
    state: CellState, job: JobState, place: TaskPlacement, gone: Container[str] = frozenset()
) -> Iterator[TaskPlacement]:
    """Places of tasks that start when this one has ended. O(tasks of the node) for a job that is being
    stopped or followed, else O(1). `gone`: jobs that do not count."""
    if job.status is not JobStatus.STOPPING and not job.succession.followed:
        return
    for task_id, other_id in state.nodes[place.node_id].tasks.items():
        other = state.jobs[other_id]
        if comes_after(other, job) and other_id not in gone and meet(place, other.tasks[task_id].place):
            yield other.tasks[task_id].place


def predecessors(
    state: CellState, job: JobState, place: TaskPlacement, gone: Container[str] = frozenset()
) -> Iterator[TaskPlacement]:
    """Places of living tasks after which this one starts. `gone`: jobs that do not count."""
    for other_id in job.succession.after:
        other = state.jobs.get(other_id)
        if other is None or other_id in gone or not comes_after(job, other):
            continue
        for task in other.tasks.values():
            found = task.place
            if found.node_id == place.node_id and task.status is not TaskStatus.EXITED and meet(place, found):
                yield found


def met(
    state: CellState, job: JobState, place: TaskPlacement, gone: Container[str] = frozenset()
) -> Iterator[TaskPlacement]:
    """Predecessors, then successors."""
    yield from predecessors(state, job, place, gone)
    yield from successors(state, job, place, gone)


def followers(state: CellState, job: JobState) -> tuple[str, ...]:
    """Ids of jobs that start when this attempt has ended, in the order of their submission; for most jobs
    none. O(tasks of its nodes) where it is followed."""
    if not job.succession.followed:
        return ()
    nodes = dict.fromkeys(task.place.node_id for task in job.tasks.values())
    named = {other_id for node_id in nodes for other_id in state.nodes[node_id].tasks.values()}
    found = [other for other_id in named if comes_after(other := state.jobs[other_id], job)]
    return tuple(other.job_id for other in sorted(found, key=lambda other: other.order))


def awaited(state: CellState, job: JobState) -> tuple[str, ...]:
    """Ids of the predecessors of its attempt that still hold one of its GPUs; for most jobs none."""
    if not job.succession.after:
        return ()
    before = {
        place.task_id.rsplit(".", 2)[0]
        for task in job.tasks.values()
        for place in predecessors(state, job, task.place)
    }
    return tuple(other_id for other_id in job.succession.after if other_id in before)
