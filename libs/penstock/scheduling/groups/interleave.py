"""Regroup stage `interleave`: jobs share GPUs in turns only where that lowers the predicted mean completion
time.

Ideal: of all ways to run and group the jobs, the one with the smallest sum of completion times. Departures: a
local search by the rate at which that sum falls now (`penstock.scheduling.groups.search.group_search`), over
the first `MAX_IN_ORDER` jobs and all running ones; speeds in a group are predicted
(`interleaving.authors_period`: a member continues as soon as its resource is free, so without the barriers of
Muri's eq. 3) and reduced by the overhead of taking turns.

Order: by remaining time × GPUs (SRSF). A job whose run time is not known is expected to need as much service
as the limit of its queue by attained service: run times are heavy-tailed, so a job that has run long is
expected to run longer. If no run time is known, this is discretised least attained service × GPUs (2D-LAS, as
under Tiresias). Departure from Tiresias, which has two or three queues: limits rise geometrically, so that
jobs of all lengths are separated, and a job comes to O(log run time) queues.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from itertools import repeat
from math import ceil, inf, log
from typing import Any

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_RANK_LEVEL, MAX_RANKS, JobRank
from penstock.model.nouns.types import StageTimes, within_ms
from penstock.scheduling.groups.candidates import Candidates, Source
from penstock.scheduling.groups.interleaving import (
    Interleaving,
    Times,
    authors_period_or_pair,
    credible_times,
)
from penstock.scheduling.groups.many_groups import many_speeds
from penstock.scheduling.groups.planned_groups import MAX_CACHED, FirstFit, PlannedGroups
from penstock.scheduling.groups.search.group_search import MAX_IN_ORDER, search
from penstock.scheduling.groups.search.group_speeds import Computed, Kinds, Tables
from penstock.scheduling.groups.search.group_weights import Job
from penstock.scheduling.groups.validate_groups import clash
from penstock.scheduling.remaining_time import ROUNDING, gpus_of, received_s, remaining_s
from penstock.scheduling.stages.regroup import Answer, Candidate, GroupPlan, Question

LOSS = (1.0, 1.4, 1.4, 1.4)
"""Overhead by number of members: an iteration's expected time as a multiple of the time that the stages alone
allow. Source: Muri's authors measured 1.33, 1.5 and 1.37; the mean is used, since measurements on one cluster
for one number of members do not carry over to another."""
FIRST_LIMIT_GPU_S = (
    3_600.0  # an hour of one GPU; 15 min to 32 h give the same mean completion times within 3 %
)
LIMITS_RATIO = 9.0  # smaller ones separate jobs that end nearly together, larger ones too few (decision 115)
LIMITS_GPU_S = tuple(FIRST_LIMIT_GPU_S * LIMITS_RATIO**queue for queue in range(MAX_RANK_LEVEL))
"""Attained service at which a job leaves each queue but the last."""
ALIKE = 1.08  # stage times within 8 % are of one kind: profiles are not more accurate
LEAST_SHARE = 0.01  # of an iteration; shorter stages are ignored
TIME_BITS = 16  # of each of the five times in a kind's number: a step of `ALIKE` up or down, of any float
MARKS_AT = 5 * TIME_BITS  # bits of a kind above its number: its marks (`validate_groups.marks_of`)
# one plan in so many is also made from scratch, not only from current groups; at whole seconds every other
# one
AFRESH_EVERY = 16
AFRESH_JOBS = 16  # up to so many jobs every plan is also made from scratch


class Interleave:
    """Implements `penstock.scheduling.stages.regroup.Regroup`. `plan`: as `Regroup.plan`."""

    exact = False
    fills = True
    beside = False

    def __init__(
        self,
        plan: Callable[[CellState, Answer], GroupPlan],
        candidates: Callable[..., Source[Any]] = Candidates,
        name: str = "interleave",
    ) -> None:
        self._plan = plan
        self._candidates = candidates(
            name, self._key, key_of=self.key, in_all=MAX_IN_ORDER, attained=received_s
        )
        self._interleaving = Interleaving(authors_period_or_pair, LOSS)
        self._planned = PlannedGroups(self._interleaving, credible_times)
        self._kinds: Computed[StageTimes | None, int | None] = Computed(self._kind)
        self._times: dict[int, Times] = {}
        """Stage times of each kind."""
        self._tables = Tables(self._speeds, self._many_speeds)

    def question(self, state: CellState) -> Question | None:
        return self._candidates.question(state)

    def solve(self, question: Question) -> Answer:
        if len(self._kinds) > MAX_CACHED:
            self._kinds.clear()
            self._times.clear()
            self._tables = Tables(self._speeds, self._many_speeds)
        candidates = question.jobs
        jobs = self._jobs(question)
        fixed = {number for number, job in enumerate(jobs) if job.fixed}
        gpus = sum(question.node_gpus)
        found = search(
            jobs,
            _present(jobs, candidates, fixed, gpus),
            gpus,
            self._tables,
            afresh=len(jobs) <= AFRESH_JOBS or question.now_ms % AFRESH_EVERY == 0,
            behind=question.behind,
            memory_mib=question.gpu_memory_mib,
        )
        groups = _placed(jobs, found, fixed, question.node_gpus)
        planned = tuple([self._planned.of([candidates[number] for number in members]) for members in groups])
        wake_ms, started_wake_ms = self._wakes(question, groups)
        return Answer(planned, self._entered(question), wake_ms, started_wake_ms)

    def _jobs(self, question: Question) -> list[Job]:
        keys, kinds, bounded = self.keys(question.jobs), self._kinds, question.gpu_memory_mib > 0
        last: dict[object, float] = {}
        """Shape → the largest key of its running jobs: a waiting job with a smaller key may replace one."""
        for job, key in zip(question.jobs, keys, strict=True):
            if job.group and key > last.get((job.shape, job.circle), 0.0):
                last[job.shape, job.circle] = key
        return [
            Job(
                job.gpus,
                (*job.shape, job.circle),
                _marked(kinds[job.stages], job.apart),
                bool(job.group) and not job.movable,
                job.gpu_memory_mib if bounded else 0,
                None if job.remaining_s < inf else _queue(job.attained_s * job.gpus),
                job.rank is None or key < last.get((job.shape, job.circle), 0.0),
                ahead,
            )
            for job, key, ahead in zip(
                question.jobs, keys, question.ahead or repeat(0.0, len(keys)), strict=True
            )
        ]

    def plan(self, state: CellState, answer: Answer) -> GroupPlan:
        return self._plan(state, answer)

    def _entered(self, question: Question) -> tuple[JobRank, ...]:
        """Ranks of jobs that are new in their queue: each is added at its end."""
        found: list[JobRank] = []
        for job in question.jobs:
            level = _level(job)
            if (job.rank is None or job.rank[0] != level) and len(found) < MAX_RANKS:
                position = question.now_ms * MAX_RANKS + len(found)
                found.append(JobRank(job_id=job.job_id, level=level, chosen=False, position=position))
        return tuple(found)

    def _wakes(self, question: Question, groups: Sequence[Sequence[int]]) -> tuple[int | None, int | None]:
        """`Answer.wake_ms` and `Answer.started_wake_ms`: when the first job with an unknown run time enters
        the next queue, of those that run and of those that are to start. None if no job waits."""
        planned = [question.jobs[number] for members in groups for number in members]
        if len(planned) == len(question.jobs) and not question.behind:
            return None, None
        lefts: dict[bool, list[float]] = {True: [], False: []}
        for job in planned:
            if job.remaining_s == inf and (level := _level(job)) < len(LIMITS_GPU_S):
                lefts[bool(job.group)].append(LIMITS_GPU_S[level] / job.gpus - job.attained_s)
        running, started = (
            within_ms(question.now_ms + max(1, ceil(min(some) * 1_000))) if some else None
            for some in (lefts[True], lefts[False])
        )
        return running, started

    def keys(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Sort keys of the question: a waiting job may replace a running one with a larger key."""
        return [self.key(job.remaining_s, job.attained_s, job.gpus) for job in candidates]

    def _key(self, state: CellState, job: JobState, cost_s: float = 0.0) -> float:
        return self.key(remaining_s(state, job), received_s(state, job), gpus_of(job))

    def key(self, left_s: float, attained: float, gpus: int) -> float:
        """GPU seconds that the job is expected to need, ≥ 0."""
        if left_s < inf:
            return left_s * gpus
        return FIRST_LIMIT_GPU_S * LIMITS_RATIO ** _queue(attained * gpus)

    def _kind(self, profiled: StageTimes | None) -> int | None:
        """The kind of stage times, computed from the times alone, so that the answer to a question does not
        depend on earlier questions. None: they are not known, or the job uses no resource."""
        if profiled is None:
            return None
        times = credible_times(profiled)
        whole = times[-1]
        if not any(times[:-1]):
            return None
        step = round(log(whole) / log(ALIKE))
        kind, typical, stages = step + (1 << TIME_BITS - 1), ALIKE**step, [0.0] * (len(times) - 1)
        for number, time in enumerate(times[:-1]):
            kind <<= TIME_BITS
            if time > whole * LEAST_SHARE:
                step = round(log(time / whole) / log(ALIKE))
                kind |= step + (1 << TIME_BITS - 1)
                stages[number] = typical * ALIKE**step
        storage, cpu, gpu, network = stages
        self._times[kind] = (storage, cpu, gpu, network, typical)
        return kind

    def _times_of(self, kind: int) -> Times:
        """Whatever its marks."""
        return self._times[kind % (1 << MARKS_AT)]

    def _speeds(self, kinds: Kinds) -> tuple[float, ...]:
        """See `group_speeds.Speeds`. A group that may not be formed has such speeds that it gains nothing."""
        if len(kinds) == 1:
            return (1.0,)
        if max(kinds) >> MARKS_AT and clash([kind >> MARKS_AT for kind in kinds]):
            return (ROUNDING,) * len(kinds)
        times = [self._times_of(kind) for kind in kinds]
        order = sorted(range(len(kinds)), key=lambda index: (times[index], index))
        found = self._interleaving.predict(tuple(times[index] for index in order)).speeds
        speeds = [0.0] * len(kinds)
        for index, speed in zip(order, found, strict=True):
            speeds[index] = min(1.0, speed)
        return tuple(speeds)

    def _many_speeds(self, groups: Sequence[Kinds]) -> list[tuple[float, ...]]:
        """See `group_speeds.ManySpeeds`, for groups of at least two members."""
        found: dict[Kinds, tuple[float, ...]] = {}
        of_size: dict[int, list[Kinds]] = {}
        for kinds in groups:
            if max(kinds) >> MARKS_AT and clash([kind >> MARKS_AT for kind in kinds]):
                found[kinds] = (ROUNDING,) * len(kinds)
            else:
                of_size.setdefault(len(kinds), []).append(kinds)
        for alike in of_size.values():
            times = [[self._times_of(kind) for kind in kinds] for kinds in alike]
            for kinds, speeds in zip(alike, many_speeds(self._interleaving, times), strict=True):
                found[kinds] = tuple([min(1.0, speed) for speed in speeds])
        return [found[kinds] for kinds in groups]


def _marked(kind: int | None, marks: int) -> int | None:
    return kind if kind is None or not marks else kind | marks << MARKS_AT


def _queue(attained_gpu_s: float) -> int:
    """The queue of a job whose run time is not known, counted from 0, by its attained service."""
    return bisect_right(LIMITS_GPU_S, attained_gpu_s)


def _level(job: Candidate) -> int:
    """The job's queue; 0 where its run time is known."""
    return 0 if job.remaining_s < inf else _queue(job.attained_s * job.gpus)


def _present(
    jobs: Sequence[Job], candidates: Sequence[Candidate], fixed: Set[int], gpus: int
) -> list[tuple[int, ...]]:
    """Groups of jobs that hold the same GPUs now. Where the cell has fewer GPUs than the groups hold,
    the last groups that may be stopped are left out.

    Drops members with unknown stage times, except a member that must not be stopped.
    """
    groups: dict[str, list[int]] = {}
    for number, job in enumerate(candidates):
        if job.group:
            groups.setdefault(job.group, []).append(number)
    found = []
    in_order = list(groups.values())
    if fixed:
        in_order.sort(key=fixed.isdisjoint)
    unknown = {number for number, job in enumerate(jobs) if job.kind is None}
    for members in in_order:
        if jobs[members[0]].gpus <= gpus:
            gpus -= jobs[members[0]].gpus
            whole = len(members) == 1 or unknown.isdisjoint(members)
            found.append(tuple(members) if whole else _shares(members, fixed, unknown))
    return found


def _shares(members: Sequence[int], fixed: Set[int], unknown: Set[int]) -> tuple[int, ...]:
    """The members of a group that may continue to share their GPUs, where the stages of some are unknown."""
    stays = [one for one in members if one in unknown and one in fixed]
    others = tuple(one for one in members if one not in unknown)
    return (stays[0],) if stays else others or (members[0],)


def _placed(
    jobs: Sequence[Job], groups: Sequence[Sequence[int]], fixed: Set[int], node_gpus: Sequence[int]
) -> list[Sequence[int]]:
    """Groups that fit the nodes by first fit, those with jobs that may not be stopped first, then most GPUs
    first, then in order; then single jobs on GPUs that are left."""
    room = FirstFit(node_gpus)
    by_gpus = sorted(groups, key=lambda members: -jobs[members[0]].gpus)
    if fixed:
        by_gpus.sort(key=fixed.isdisjoint)
    found = [members for members in by_gpus if room.give(_shape(jobs[members[0]]))]
    if len(found) < len(by_gpus):
        runs = {number for members in found for number in members}
        found += [
            (number,) for number, job in enumerate(jobs) if number not in runs and room.give(_shape(job))
        ]
    return found


def _shape(job: Job) -> tuple[int, int, int, int]:
    assert isinstance(job.shape, tuple), job
    workers, gpus, servers, server_gpus, _ = job.shape
    return workers, gpus, servers, server_gpus
