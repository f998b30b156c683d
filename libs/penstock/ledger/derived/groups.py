"""Resource accounting of groups: members hold GPUs and cores once, the largest member's bandwidth, and the
memory of all.

Tasks of one rank hold one such lease. Each is booked with what it takes beyond the others (`own_part`), so
that a task's end frees exactly what only that task needed, in whatever order they end.
"""

from collections.abc import Container, Iterable, Iterator, Sequence

from msgspec.structs import replace

from penstock.ledger.derived.succession import beyond, follow, meet, met, units_beyond
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import TaskPlacement


def others(
    state: CellState, job: JobState, rank: int, gone: Container[str] = frozenset()
) -> list[TaskPlacement]:
    """Places of the other members' living tasks of this rank; none for a job that is in no group. O(members).

    `gone`: ids of members that do not count.
    """
    if not job.sharing.group:
        return []
    return [
        task.place
        for other in state.groups[job.sharing.group].values()
        if other is not job and other.job_id not in gone
        for task in other.tasks.values()
        if task.place.rank == rank and task.status is not TaskStatus.EXITED
    ]


def own_part(place: TaskPlacement, beside: Sequence[TaskPlacement]) -> TaskPlacement:
    """What a task takes of its node beyond others of its group; its whole place where there are none."""
    if not beside:
        return place
    gpus, cores = units_beyond(place, beside)
    most_mbps = max([other.bandwidth_mbps for other in beside])
    return replace(place, gpus=gpus, cores=cores, bandwidth_mbps=max(0, place.bandwidth_mbps - most_mbps))


def booked(
    state: CellState, job: JobState, place: TaskPlacement, gone: Container[str] = frozenset()
) -> TaskPlacement:
    """What this task takes of its node beyond the other members' tasks (`others`), or beyond its predecessors
    and successors; else its whole place."""
    if job.sharing.group:
        return own_part(place, others(state, job, place.rank, gone))
    if job.succession.after or job.succession.followed or job.status is JobStatus.STOPPING:
        return beyond(place, list(met(state, job, place, gone)))
    return place


def own_parts(held: Iterable[tuple[JobState, TaskPlacement]]) -> Iterator[TaskPlacement]:
    """What these tasks take together: of each the part beyond those before it."""
    leases: dict[tuple[str, int], list[TaskPlacement]] = {}
    seen: list[tuple[JobState, TaskPlacement]] = []
    for job, place in held:
        if not job.sharing.group:
            yield beyond(place, [one for other, one in seen if follow(job, other) and meet(place, one)])
            seen.append((job, place))
            continue
        before = leases.setdefault((job.sharing.group, place.rank), [])
        yield own_part(place, before)
        before.append(place)


def frees_gpus(state: CellState, job: JobState) -> bool:
    """Whether the end of this job, which is being stopped, frees its GPUs. A group frees them once: by its
    oldest member, when all members stop."""
    if not job.sharing.group:
        return True
    members = state.groups[job.sharing.group].values()
    return holds_first(state, job) and all(member.status is JobStatus.STOPPING for member in members)


def holds_first(state: CellState, job: JobState) -> bool:
    """Whether the job's GPUs are counted for this job: those of a group are counted for its oldest member."""
    group = job.sharing.group
    return not group or job.order == min(member.order for member in state.groups[group].values())
