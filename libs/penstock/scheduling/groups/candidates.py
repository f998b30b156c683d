"""Inputs of regroup plans, read from the state: the candidate jobs that may run or share GPUs.

Waiting jobs are in sorted rows, one per shape, that change only when jobs do
(`penstock.scheduling.order.job_rows`); a question takes the first of them and all running jobs: O(running
jobs + waiting jobs that are taken).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import chain, islice
from math import inf, nextafter
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from penstock.cluster.view import held_places
from penstock.ledger.derived.stages import latest_profile, stage_times
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.nouns.types import WHOLE_GPU, StageTimes
from penstock.scheduling.groups.gang_turns import why_no_turns
from penstock.scheduling.groups.validate_groups import Pairs, circle_of, marks_of, pairs_apart
from penstock.scheduling.order.job_rows import CONTENDING, Entry, JobRows, will_queue_again
from penstock.scheduling.remaining_time import Key, attained_s, remaining_s
from penstock.scheduling.stages.regroup import ALL_JOBS, Candidate, Question, Scope
from penstock.scheduling.stop_cost import fixed_cost_s, loses, stop_cost_s

Item = TypeVar("Item")
Shape = tuple[int, int, int, int]


def shape_of(job: JobState) -> Shape | None:
    """(workers, GPUs per worker, parameter servers, GPUs per server); None for jobs without whole GPUs, which
    no regroup stage plans. Only for jobs with an estimate."""
    estimate = job.estimate
    if estimate is None or not estimate.worker.gpus or estimate.worker.gpu_share_milli != WHOLE_GPU:
        return None
    servers = job.spec.parameter_servers
    return job.workers, estimate.worker.gpus, servers, estimate.parameter_server.gpus if servers else 0


def gpus_in(shape: Shape) -> int:
    """GPUs of all tasks."""
    workers, gpus, servers, server_gpus = shape
    return workers * gpus + servers * server_gpus


class _Needs(Struct, frozen=True, gc=False):
    """The part of a candidate that stays the same while its version (`JobState.version`) and the stage
    profiles do."""

    version: int
    shape: Shape | None
    """None: the stage does not plan the job."""
    stages: StageTimes | None
    gpu_memory_mib: int
    circle: str
    apart: int
    group: str
    """As `Candidate.group`."""
    stop_cost_s: float
    """As `Candidate.stop_cost_s`, but for what the job loses while it runs on."""
    loses: bool
    """Whether that cost rises with time."""
    stops: bool
    """Whether it may stop it."""


class Gathered(NamedTuple, Generic[Item]):
    """The inputs of a question but for the order of its jobs."""

    items: list[Item]
    """One for each candidate, in no order."""
    node_gpus: Sequence[int]
    behind: int
    """As `Question.behind`."""


KeyOf = Callable[[float, float, int], float]
"""A sort key from a job's remaining and attained time in s, and its workers' GPUs."""


class Source(Generic[Item]):
    """The candidates of one stage, each as an item of a subclass. `key`: sort key of waiting jobs, the
    smallest comes first; `key_of`: the same from a candidate's fields.

    `in_all`: maximum number of waiting jobs in a question; None: enough of each shape to fill the cell, which
    is `per_gpus` times as many as fit the empty cell. `attained`: gives a candidate's attained time.
    """

    def __init__(
        self,
        name: str,
        key: Key,
        *,
        key_of: KeyOf | None = None,
        per_gpus: int = 1,
        in_all: int | None = None,
        scope: Scope = ALL_JOBS,
        attained: Callable[[CellState, JobState], float] = attained_s,
    ) -> None:
        self._name, self._key, self._key_of = name, key, key_of
        self._per_gpus, self._in_all = per_gpus, in_all
        self._scope = scope
        self._attained = attained
        self._rows: JobRows[Any] = JobRows(self._row)
        """Row → its waiting jobs."""
        self._of_waiting: dict[str, Item] = {}
        """Items of waiting jobs; dropped when the job or the profiles change."""
        self._needs: dict[int, _Needs] = {}
        """`JobState.order` → needs: unlike an id an order is not given twice."""
        self._profile: StagesProfiled | None = None
        """The latest profile when they were made."""
        self._apart: Pairs = ()
        """Pairs of kinds that were not grouped then."""

    def question(self, state: CellState) -> Question | None:
        """As `Regroup.question`."""
        raise NotImplementedError

    def _item(self, state: CellState, job: JobState, candidate: Candidate) -> Item:
        """The item of a candidate. That of a waiting job stays the same until the job changes, whatever the
        time."""
        raise NotImplementedError

    def _row(self, state: CellState, job: JobState) -> tuple[Any, Any] | None:
        """The row of a waiting job, and its key there; None: it is not planned."""
        shape = self._shape(job)
        return None if shape is None else (shape, self._key_in_row(state, job))

    def _key_in_row(self, state: CellState, job: JobState) -> tuple[float, ...]:
        return self._key(state, job), place_in_queue(job.rank)

    def _shape(self, job: JobState) -> Shape | None:
        """None: the stage does not plan the job."""
        return shape_of(job) if self._scope.plans(job) else None

    def _gathered(self, state: CellState) -> Gathered[Item] | None:
        """None: no job waits and no jobs share GPUs, or there are no GPUs."""
        changed, anew = self._rows.update(state)
        profile, apart = latest_profile(state), pairs_apart(state)
        if anew or profile is not self._profile or apart != self._apart:
            self._of_waiting.clear()
            self._needs.clear()
            self._profile, self._apart = profile, apart
        for job_id in self._of_waiting.keys() & changed:
            del self._of_waiting[job_id]
        rows = self._waiting_rows()
        stopped = [job for job in state.stopping.values() if will_queue_again(job) and self._shape(job)]
        if not rows and not stopped and not state.groups:
            return None
        node_gpus = list(state.sound_gpus)
        running = self._running(state, node_gpus)
        gpus = sum(node_gpus)
        if not gpus:
            return None
        items = self._waiting(state, rows, gpus)
        behind = sum(map(len, rows)) - len(items)
        items += [self._item(state, job, self._candidate(state, job, needs)) for job, needs in running]
        items += [
            self._item(state, job, self._candidate(state, job, self._needs_of(state, job))) for job in stopped
        ]
        return Gathered(items, node_gpus, behind)

    def _question(self, state: CellState, jobs: Sequence[Candidate], found: Gathered[Item]) -> Question:
        return Question(
            stage=self._name,
            jobs=tuple(jobs),
            ahead=self._ahead(jobs) if found.behind and self._in_all is not None else (),
            node_gpus=tuple(found.node_gpus),
            gpu_memory_mib=_memory(state),
            now_ms=state.now_ms,
            behind=found.behind,
        )

    def _ahead(self, jobs: Sequence[Candidate]) -> tuple[float, ...]:
        """`Question.ahead`. O(jobs · log jobs + rows · log waiting jobs for each of the few keys of jobs with
        unknown run times)."""
        if all(job.remaining_s < inf for job in jobs):
            return ()
        rows = self._waiting_rows()
        keys = [self._key_from(job) for job in jobs]
        listed = sorted([key for job, key in zip(jobs, keys, strict=True) if job.job_id in self._of_waiting])
        found: dict[float, float] = {}
        for job, key in zip(jobs, keys, strict=True):
            if job.remaining_s == inf and key not in found:
                then = (nextafter(key, inf),)
                before = sum([bisect_left(row, ((key,),)) for row in rows]) - bisect_left(listed, key)
                through = sum([bisect_left(row, (then,)) for row in rows]) - bisect_right(listed, key)
                found[key] = (before + through) / 2
        return tuple(
            [found[key] if job.remaining_s == inf else 0.0 for job, key in zip(jobs, keys, strict=True)]
        )

    def _key_from(self, job: Candidate) -> float:
        assert self._key_of is not None, self._name
        workers, gpus, _, _ = job.shape
        return self._key_of(job.remaining_s, job.attained_s, workers * gpus)

    def _waiting_rows(self) -> Sequence[list[Entry[Any]]]:
        """Rows of the jobs that are planned."""
        return list(self._rows.waiting.values())

    def _waiting(self, state: CellState, rows: Sequence[list[Entry[Any]]], gpus: int) -> list[Item]:
        found = []
        for _, _, job_id, _ in self._taken(rows, gpus):
            item = self._of_waiting.get(job_id)
            if item is None:
                job = state.jobs[job_id]
                candidate = self._candidate(state, job, self._needs_of(state, job))
                item = self._of_waiting[job_id] = self._item(state, job, candidate)
            found.append(item)
        return found

    def _taken(self, rows: Sequence[list[Entry[Any]]], gpus: int) -> Iterable[Entry[Any]]:
        """The waiting jobs that the question takes, in no order."""
        if self._in_all is not None:
            return first_of(rows, self._in_all)
        return (
            entry
            for entries in rows
            for entry in entries[: self._per_gpus * (gpus // gpus_in(entries[0][3]))]
        )

    def _running(self, state: CellState, node_gpus: list[int]) -> list[tuple[JobState, _Needs]]:
        """Running jobs that may be planned, in no order; the GPUs of all other jobs are taken out of
        `node_gpus`."""
        running: list[tuple[JobState, _Needs]] = []
        others: set[tuple[int, int]] = set()
        closed = {node_id for node_id, node in state.nodes.items() if not node.placeable}
        for job in state.holding.values():
            if job.status in CONTENDING and not job.target and (needs := self._needs_of(state, job)).shape:
                if not closed or not any(task.place.node_id in closed for task in job.tasks.values()):
                    running.append((job, needs))
                    continue
            elif will_queue_again(job):
                continue
            for place in held_places(job):
                node = state.nodes.get(place.node_id)
                if node is not None and node.placeable:
                    others.update((node.ordinal, gpu) for gpu in place.gpus)
        for ordinal, _ in others:
            node_gpus[ordinal] = max(0, node_gpus[ordinal] - 1)
        return running

    def _candidate(self, state: CellState, job: JobState, needs: _Needs) -> Candidate:
        assert needs.shape is not None, job.job_id
        return Candidate(
            job.job_id,
            gpus_in(needs.shape),
            needs.shape,
            needs.stages,
            remaining_s(state, job),
            self._attained(state, job),
            job.order,
            job.rank,
            needs.group,
            needs.stops,
            stop_cost_s(state, job) if needs.loses else needs.stop_cost_s,
            needs.gpu_memory_mib,
            needs.circle,
            needs.apart,
        )

    def _needs_of(self, state: CellState, job: JobState) -> _Needs:
        """Only for jobs with an estimate."""
        found = self._needs.get(job.order)
        if found is not None and found.version == job.version:
            return found
        if len(self._needs) > 2 * len(state.jobs):  # most are of jobs that have ended
            self._needs.clear()
        estimate, shape, runs = job.estimate, self._shape(job), job.status in CONTENDING
        assert estimate is not None, job.job_id
        found = self._needs[job.order] = _Needs(
            job.version,
            shape,
            None if shape is None or why_no_turns(shape[0], shape[2], ()) else stage_times(state, job),
            estimate.worker.gpu_memory_mib,
            circle_of(job),
            marks_of(self._apart, job),
            (job.sharing.group or f"{job.job_id}/alone") if runs else "",
            fixed_cost_s(job) if runs else 0.0,
            runs and loses(job),
            self._scope.stops(job),
        )
        return found


def first_of(rows: Sequence[list[Entry[Any]]], most: int) -> Iterable[Entry[Any]]:
    """The first `most` entries of all rows together, in no order."""
    if sum(map(len, rows)) <= most:
        return chain.from_iterable(rows)
    return islice(merge(*rows), most)


class Candidates(Source[tuple[tuple[object, ...], Candidate]]):
    """The candidates in order of `key`; ties: running jobs, then by arrival in its queue."""

    def question(self, state: CellState) -> Question | None:
        """None: no job waits and no jobs share GPUs, or there are no GPUs."""
        found = self._gathered(state)
        if found is None:
            return None
        found.items.sort(key=itemgetter(0))
        return self._question(state, [candidate for _, candidate in found.items], found)

    def _item(
        self, state: CellState, job: JobState, candidate: Candidate
    ) -> tuple[tuple[object, ...], Candidate]:
        key = self._key(state, job) if self._key_of is None else self._key_from(candidate)
        return self._place(key, candidate), candidate

    def _place(self, key: float, job: Candidate) -> tuple[object, ...]:
        return job.movable or not job.group, key, not job.group, place_in_queue(job.rank), job.order


def _memory(state: CellState) -> int:
    """Memory of the smallest GPU that may be used; 0: none has any."""
    return min(
        (
            node.gpu_memory_mib
            for node, gpus in (
                (state.node(ordinal), gpus) for ordinal, gpus in enumerate(state.sound_gpus) if gpus
            )
        ),
        default=0,
    )


def place_in_queue(rank: tuple[int, int, int] | None) -> float:
    """Position among jobs with equal keys, where each job is added at the end of its queue; jobs without a
    rank come last."""
    return inf if rank is None else rank[2]
