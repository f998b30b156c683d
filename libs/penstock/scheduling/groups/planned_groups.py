"""First-fit counts of GPUs for groups of one shape, and groups with their predicted interleaving."""

from collections.abc import Callable, Sequence

from penstock.model.decisions.groups import Turns
from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.interleaving import Interleaving, Times, times_of
from penstock.scheduling.stages.regroup import Candidate, PlannedGroup

MAX_CACHED = 4_096  # planned groups, or kinds: some 2 KB each
Shape = tuple[int, int, int, int]


class FirstFit:
    """First-fit allocation of GPUs.
    Capacity only shrinks, so a shape that was refused once is always refused."""

    def __init__(self, node_gpus: Sequence[int]) -> None:
        self._free = list(node_gpus)
        self._first: dict[int, int] = {}
        """GPUs of one task → the first node that may have so many free."""
        self._refused: set[Shape] = set()

    def give(self, shape: Shape) -> bool:
        """Places all tasks of a job, each on the first node with enough GPUs, or none;
        returns whether they fit."""
        if shape in self._refused:
            return False
        workers, gpus, servers, server_gpus = shape
        given: list[tuple[int, int]] = []
        if (not gpus or self._give(workers, gpus, given)) and (
            not server_gpus or self._give(servers, server_gpus, given)
        ):
            return True
        for node, taken in given:
            self._free[node] += taken
        self._first.clear()
        self._refused.add(shape)
        return False

    def _give(self, tasks: int, each: int, given: list[tuple[int, int]]) -> bool:
        free = self._free
        node = self._first.get(each, 0)
        while tasks and node < len(free):
            here = free[node] // each
            if here:
                if here > tasks:
                    here = tasks
                free[node] -= here * each
                given.append((node, here * each))
                tasks -= here
            if tasks:
                node += 1
        self._first[each] = node
        return not tasks


class PlannedGroups:
    """Groups with their predicted interleaving, cached by the members' ids and stages. `times`: a member's
    stage times for the prediction."""

    def __init__(self, interleaving: Interleaving, times: Callable[[StageTimes], Times] = times_of) -> None:
        self._interleaving, self._times = interleaving, times
        self._known: dict[tuple[object, ...], PlannedGroup] = {}

    def of(self, members: Sequence[Candidate]) -> PlannedGroup:
        if len(members) == 1:
            return PlannedGroup((members[0].job_id,))
        key = (*[job.job_id for job in members], *[job.stages for job in members])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            found = self._known[key] = _planned_group(self._interleaving, members, self._times)
        return found


def _planned_group(
    interleaving: Interleaving, members: Sequence[Candidate], times: Callable[[StageTimes], Times]
) -> PlannedGroup:
    ids = tuple(job.job_id for job in members)
    if any(job.stages is None for job in members):
        return PlannedGroup(ids)
    known = [(times(job.stages), job.order, job) for job in members if job.stages is not None]
    known.sort(key=lambda one: one[:2])
    by_kind = [job for _, _, job in known]
    found = interleaving.predict(tuple(one for one, _, _ in known))
    return PlannedGroup(
        ids,
        Turns(
            job_ids=tuple(by_kind[index].job_id for index in found.order),
            period_ms=found.period_ms,
            efficiency=found.efficiency,
            speeds=tuple(found.speeds[index] for index in found.order),
            alternative=f"one after the other: {found.alone_ms:,.0f} ms",
        ),
    )
