"""Muri's multi-round grouping (Alg. 1): groups jobs that share GPUs in turns, by rounds of maximum-weight
matching.

1. Candidates: jobs are taken in order by first fit on empty nodes, each with the next jobs of its shape, up
   to a group's maximum.
2. Rounds, while the candidates need more GPUs than the cell has: a matching with the largest sum of γ is
   computed over the groups of each shape (at first of one job each), and its pairs merge one after the other
   until the GPUs suffice.
3. Groups in order of their first member get GPUs, first fit; all others wait.

Sources: Muri §4.2–4.3; additional steps of the published program: after the rounds a group whose iteration
takes longer than its members' one after the other is `split`; finally groups get nodes in descending order of
GPUs. Departures: jobs that may not be stopped come first and are never matched with such jobs on other GPUs;
members' memory must fit together; jobs with unknown stages do not share; of equal matchings the one whose
members hold the same GPUs now is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.interleaving import MAX_KNOWN, Interleaving, Prediction, Times, times_of
from penstock.scheduling.groups.planned_groups import MAX_CACHED, FirstFit, PlannedGroups, Shape
from penstock.scheduling.stages.regroup import Candidate, PlannedGroup
from penstock_papers.muri.many_efficiencies import Unit, union_efficiencies
from penstock_papers.muri.matching import match_kinds, match_many_kinds
from penstock_papers.muri.matching_chains import Pairs
from penstock_papers.settings import Grouping

MAX_ROUNDS = (
    4  # Alg. 1 has log₂ 4; a round that merges only the pairs that are needed leaves some to the next
)
MAX_KINDS_MATCHED = 64  # by `match_kinds`


class _Kind(NamedTuple):
    """Groups of the same kind are interchangeable for a matching."""

    times: tuple[Times, ...]
    """Stage times of the members, ascending; empty: the group cannot share."""
    fixed: str
    """The GPUs (`Candidate.group`) on which it must stay; empty: none."""
    memory_mib: int


class _Group(NamedTuple):
    members: tuple[int, ...]
    """Indexes into the list of jobs, ascending."""
    kind: _Kind


class Grouper:
    """Alg. 1 with its caches. `interleaving`: predicts groups; `grouping`: options of the algorithm."""

    def __init__(self, interleaving: Interleaving, grouping: Grouping) -> None:
        self._interleaving, self._grouping = interleaving, grouping
        self._weight = lru_cache(maxsize=MAX_KNOWN)(self._weight_of)
        self._match = lru_cache(maxsize=MAX_CACHED)(self._matched)
        self._single = lru_cache(maxsize=MAX_CACHED)(_single)
        self._planned = PlannedGroups(interleaving)

    def groups(
        self, jobs: Sequence[Candidate], keys: Sequence[float], node_gpus: Sequence[int], memory_mib: int
    ) -> list[tuple[int, ...]]:
        """The groups that run, as indexes of `jobs`, in the order in which they get nodes. `jobs`: in order,
        with `keys` ascending; `memory_mib`: of a GPU, 0: not bounded."""
        gpus = sum(node_gpus)
        first = FirstFit(node_gpus)
        by_shape: dict[Shape, list[int]] = {}
        for index, job in enumerate(jobs):
            by_shape.setdefault(job.shape, []).append(index)
        candidates = self._candidates(jobs, by_shape, first)
        buckets = self._singles(jobs, candidates, memory_mib)
        needed = sum(jobs[groups[0].members[0]].gpus * len(groups) for groups in buckets.values() if groups)
        if self._grouping.matching:
            for _ in range(MAX_ROUNDS):
                if needed <= gpus:
                    break
                before = needed
                for shape, groups in buckets.items():
                    each = jobs[groups[0].members[0]].gpus
                    most = -(-(needed - gpus) // each) if needed > gpus else 0
                    buckets[shape] = merged = self._round(jobs, groups, most, memory_mib)
                    needed -= each * (len(groups) - len(merged))
                if needed == before:
                    break
        else:
            for shape, groups in buckets.items():
                each = jobs[groups[0].members[0]].gpus
                buckets[shape] = cut = self._in_runs(groups, needed - gpus, each, memory_mib)
                needed -= each * (len(groups) - len(cut))
        found = [group for groups in buckets.values() for group in self._split(groups)]
        return _placed(jobs, keys, found, node_gpus)

    def planned(self, jobs: Sequence[Candidate], members: Sequence[int]) -> PlannedGroup:
        """The group with its predicted interleaving."""
        return self._planned.of([jobs[index] for index in members])

    def _candidates(
        self, jobs: Sequence[Candidate], by_shape: Mapping[Shape, Sequence[int]], first: FirstFit
    ) -> list[int]:
        """Step 1, in order."""
        taken = [False] * len(jobs)
        waiting = {shape: iter(indexes) for shape, indexes in by_shape.items()}
        for index, job in enumerate(jobs):
            if taken[index] or not first.give(job.shape):
                continue
            left = self._grouping.max_members
            for other in waiting[job.shape]:
                if taken[other]:
                    continue
                taken[other] = True
                left -= 1
                if not left:
                    break
        return [index for index, one in enumerate(taken) if one]

    def _singles(
        self, jobs: Sequence[Candidate], candidates: Sequence[int], memory_mib: int
    ) -> dict[Shape, list[_Group]]:
        """Groups of one job; jobs that may not be stopped and share GPUs already form one group. Shapes in
        order of their first job."""
        buckets: dict[Shape, list[_Group]] = {}
        fixed: dict[str, list[int]] = {}
        for index in candidates:
            job = jobs[index]
            if not job.movable and job.group:
                fixed.setdefault(job.group, []).append(index)
        for index in candidates:
            job = jobs[index]
            if job.movable or not job.group:
                kind = self._single(job.stages, job.gpu_memory_mib if memory_mib else 0)
                buckets.setdefault(job.shape, []).append(_Group((index,), kind))
                continue
            members = tuple(fixed[job.group])
            if members[0] != index:
                continue
            known = [stages for member in members if (stages := jobs[member].stages) is not None]
            times = tuple(sorted(map(times_of, known))) if len(known) == len(members) else ()
            memory = sum(jobs[member].gpu_memory_mib for member in members) if memory_mib else 0
            kind = _Kind(times, job.group, memory)
            buckets.setdefault(job.shape, []).append(_Group(members, kind))
        return buckets

    def _weight_of(self, one: _Kind, other: _Kind, memory_mib: int) -> float:
        """γ of the merged group; 0: they may not share."""
        if not one.times or not other.times or (one.fixed and other.fixed):
            return 0.0
        if len(one.times) + len(other.times) > self._grouping.max_members:
            return 0.0
        if memory_mib and one.memory_mib + other.memory_mib > memory_mib:
            return 0.0
        return self._predict(tuple(sorted(one.times + other.times))).efficiency

    def _predict(self, times: tuple[Times, ...]) -> Prediction:
        return self._interleaving.predict(times)

    def _matched(self, kinds: tuple[_Kind, ...], counts: tuple[int, ...], memory_mib: int) -> Pairs:
        size = len(kinds)
        if size > MAX_KINDS_MATCHED:
            units = [Unit(kind.times, bool(kind.fixed), kind.memory_mib) for kind in kinds]
            found = union_efficiencies(self._interleaving, units, self._grouping.max_members, memory_mib)
            for number, kind in enumerate(kinds):
                found[number, number] = self._weight(kind, kind, memory_mib)
            return match_many_kinds(counts, found)
        weights = [[0.0] * size for _ in kinds]
        for one in range(size):
            for other in range(one + 1):
                weights[one][other] = weights[other][one] = self._weight(kinds[one], kinds[other], memory_mib)
        return match_kinds(counts, weights)

    def _round(
        self, jobs: Sequence[Candidate], groups: Sequence[_Group], most: int, memory_mib: int
    ) -> list[_Group]:
        """One matching; the first `most` of its pairs merge, in order of their later member, and take its
        position."""
        if most <= 0 or len(groups) < 2:
            return list(groups)
        of_kind: dict[_Kind, list[int]] = {}
        for number, group in enumerate(groups):
            of_kind.setdefault(group.kind, []).append(number)
        kinds = tuple(sorted(of_kind))
        pairs = self._match(kinds, tuple(len(of_kind[kind]) for kind in kinds), memory_mib)
        partner: dict[int, int] = {}
        for one, other in _choose(jobs, groups, [of_kind[kind] for kind in kinds], pairs):
            partner[max(one, other)] = min(one, other)
        merging = dict(sorted(partner.items())[:most])
        gone = set(merging.values())
        return [
            _united(groups[merging[number]], group) if number in merging else group
            for number, group in enumerate(groups)
            if number not in gone
        ]

    def _in_runs(self, groups: Sequence[_Group], lacking: int, each: int, memory_mib: int) -> list[_Group]:
        """Without matching: consecutive groups form runs of a group's maximum size; each joins the first of
        its run while GPUs are short."""
        found: list[_Group] = []
        for start in range(0, len(groups), self._grouping.max_members):
            first, *others = groups[start : start + self._grouping.max_members]
            for group in others:
                if lacking > 0 and self._weight(first.kind, group.kind, memory_mib) > 0:
                    first = _united(first, group)
                    lacking -= each
                else:
                    found.append(group)
            found.append(first)
        return found

    def _split(self, groups: Sequence[_Group]) -> Iterator[_Group]:
        """Splits groups whose members would be faster one after the other, except those that must stay
        together."""
        for group in groups:
            if self._grouping.split and len(group.members) > 1 and not group.kind.fixed:
                found = self._predict(group.kind.times)
                if found.period_ms > found.alone_ms:
                    for member in group.members:
                        yield _Group((member,), group.kind)
                    continue
            yield group


def _single(stages: StageTimes | None, memory_mib: int) -> _Kind:
    """The kind of a group of one job that may be stopped, or waits."""
    return _Kind(() if stages is None else (times_of(stages),), "", memory_mib)


def _united(one: _Group, other: _Group) -> _Group:
    return _Group(
        tuple(sorted(one.members + other.members)),
        _Kind(
            tuple(sorted(one.kind.times + other.kind.times)),
            one.kind.fixed or other.kind.fixed,
            one.kind.memory_mib + other.kind.memory_mib,
        ),
    )


def _choose(
    jobs: Sequence[Candidate], groups: Sequence[_Group], of_kind: Sequence[list[int]], pairs: Pairs
) -> Iterator[tuple[int, int]]:
    """Chooses the pairs of groups for matched kinds: those that hold the same GPUs now, then the first in
    order."""
    held = [{jobs[member].group for member in group.members} - {""} for group in groups]
    left = [dict.fromkeys(numbers) for numbers in of_kind]
    missing = dict(pairs)
    for (kind, other), count in pairs.items():
        by_group = {group: number for number in reversed(of_kind[other]) for group in held[number]}
        for one in of_kind[kind]:
            if not count:
                break
            if one not in left[kind]:
                continue
            mates = sorted(by_group[group] for group in held[one] if group in by_group)
            mate = next((number for number in mates if number in left[other] and number != one), None)
            if mate is not None:
                count -= 1
                del left[kind][one], left[other][mate]
                yield one, mate
        missing[kind, other] = count
    for (kind, other), count in missing.items():
        for _ in range(count):
            one = next(iter(left[kind]))
            del left[kind][one]
            mate = next(iter(left[other]))
            del left[other][mate]
            yield one, mate


def _placed(
    jobs: Sequence[Candidate], keys: Sequence[float], groups: list[_Group], node_gpus: Sequence[int]
) -> list[tuple[int, ...]]:
    """Step 3."""
    groups.sort(key=lambda group: min(keys[member] for member in group.members))
    room = FirstFit(node_gpus)
    chosen = [group.members for group in groups if room.give(jobs[group.members[0]].shape)]
    return sorted(chosen, key=lambda members: (-jobs[members[0]].gpus, members[0]))
