"""Local search for groups: chooses the jobs that run, and those that share GPUs in turns, so that the
predicted mean completion time falls fastest.

Jobs are given in order of priority. In the fluid limit a job that ends dt earlier gains dt for itself, and
g/G · dt for each job behind it in the order, since g of G GPUs become free for them. So a job that runs at
`speed` (relative to alone) has the value speed · w per second, with

    w_i = own_i + g_i / G · (jobs behind i), own_i = 1

and the search maximises Σ speed · w over groups that fit on G GPUs. Alone a job has speed 1: sharing is
chosen only where it gains by this measure, and no jobs share while GPUs are free. Weights of jobs whose run
time is not known: `penstock.scheduling.groups.search.group_weights`. Source: own; Muri §4.2 maximises the
efficiency γ without regard to the order, and so is worse than no grouping where few jobs complement each
other.

The search starts from the current groups, and a second time from scratch if requested; the plan from scratch
is used only if its value is larger by more than `STAY`, since restarts have a cost. Steps, each only while it
gains:
1. in order, each job runs alone on free GPUs, else joins the group of the same shape that gains most;
2. a waiting job replaces a member; where the search starts from current groups, only a new job;
3. a new group of waiting jobs is admitted, for which groups are merged or dropped;
4. members move out of groups to free GPUs. Of groups with members of the same kinds only the one with the
   smallest weight is examined: weights differ little, kinds much.
"""

from bisect import insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from operator import itemgetter, mul

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.scheduling.groups.search.group_speeds import MANY, Computed, Kinds, Tables
from penstock.scheduling.groups.search.group_weights import Job, weights
from penstock.scheduling.groups.search.searched_group import Group, Merge, by_weight, group_of, value_of
from penstock.scheduling.remaining_time import ROUNDING

STAY = 0.03  # relative gain required of a plan from scratch over one from the current groups
MAX_IN_ORDER = 512  # jobs that are examined
MAX_ADMITTED = 8  # groups admitted in one search
AHEAD = 16  # jobs in order whose unions are predicted at once


class _Bucket:
    """Groups of one shape, by their members' kinds; each list by weight."""

    def __init__(self, gpus: int, tables: Tables, memory_mib: int, most: int) -> None:
        self.gpus = gpus
        self._tables = tables
        self._memory_mib, self._most = memory_mib, most
        self.of_kinds: dict[Kinds, list[Group]] = {}
        self.alone: list[Group] = []
        """Groups of jobs that cannot share."""
        self._cheapest: Merge | None = None
        self._known = False

    def copy(self) -> "_Bucket":
        found = _Bucket(self.gpus, self._tables, self._memory_mib, self._most)
        found.of_kinds = {kinds: list(groups) for kinds, groups in self.of_kinds.items()}
        found.alone = list(self.alone)
        found._cheapest, found._known = self._cheapest, self._known
        return found

    def groups(self) -> Iterator[Group]:
        yield from self.alone
        for groups in self.of_kinds.values():
            yield from groups

    def add(self, group: Group) -> None:
        self._known = False
        alike = self.of_kinds.get(group.kinds) if group.kinds else self.alone
        if alike is None:
            self.of_kinds[group.kinds] = [group]
        else:
            insort(alike, group, key=by_weight)

    def remove(self, group: Group) -> None:
        self._known = False
        if not group.kinds:
            self.alone.remove(group)
            return
        groups = self.of_kinds[group.kinds]
        groups.remove(group)
        if not groups:
            del self.of_kinds[group.kinds]

    def foresee(self, new: Collection[int | None]) -> None:
        """Computes in advance what `join` of members of these kinds asks."""
        self._tables.foresee([kinds for kinds in self.of_kinds if len(kinds) < self._most], new)

    def join(self, new: Group) -> tuple[float, Group] | None:
        """The group that gains most from a new member, if any does: (gain, group)."""
        best, found = ROUNDING, None
        most, memory_mib = self._most - len(new.kinds), self._memory_mib
        unions, weight = self._tables.unions[new.kinds], new.heaviest
        for kinds, groups in self.of_kinds.items():
            if len(kinds) > most:
                continue
            group = groups[0]
            if memory_mib and group.memory_mib + new.memory_mib > memory_mib:
                group = next((one for one in groups if one.memory_mib + new.memory_mib <= memory_mib), new)
                if group is new:
                    continue
            union, heaviest = unions[kinds], group.heaviest
            if (heaviest if heaviest > weight else weight) * union.total - group.value <= best:
                continue
            gain = value_of(union, new, group) - group.value
            if gain > best:
                best, found = gain, group
        return None if found is None else (best, found)

    def united(self, one: Group, other: Group) -> Group:
        both = one.kinds + other.kinds
        by_kind = itemgetter(*sorted(range(len(both)), key=both.__getitem__))
        return group_of(
            by_kind(one.members + other.members),
            by_kind(both),
            by_kind(one.weights + other.weights),
            value_of(self._tables.union(one.kinds, other.kinds), one, other),
            one.fixed or other.fixed,
            one.memory_mib + other.memory_mib,
        )

    def cheapest(self) -> Merge | None:
        """The merge or drop that frees one group's GPUs with the least loss."""
        if not self._known:
            self._cheapest, self._known = self._search(), True
        return self._cheapest

    def _search(self) -> Merge | None:
        least = inf
        best: tuple[Group, Group | None] | None = None
        for groups in (self.alone, *self.of_kinds.values()):
            for group in groups:
                if not group.fixed:
                    if group.value < least:
                        least, best = group.value, (group, None)
                    break
        heads: list[tuple[Group, int, Kinds, float, float]] = []
        for kinds, groups in self.of_kinds.items():
            size = len(kinds)
            if size < self._most:
                first = groups[: 2 if 2 * size <= self._most else 1]
                heads += [(group, size, kinds, group.value, group.heaviest) for group in first]
        most, memory_mib, tables = self._most, self._memory_mib, self._tables
        for number, (one, size, kinds, value, heaviest) in enumerate(heads):
            others_most, unions, fixed = most - size, tables.unions[kinds], one.fixed
            for other, other_size, other_kinds, other_value, heavier in heads[:number]:
                if other_size > others_most or (fixed and other.fixed):
                    continue
                if memory_mib and one.memory_mib + other.memory_mib > memory_mib:
                    continue
                apart, union = value + other_value, unions[other_kinds]
                if apart - (heavier if heavier >= heaviest else heaviest) * union.total >= least:
                    continue
                loss = apart - value_of(union, one, other)
                if loss < least:
                    least, best = loss, (one, other)
        return None if best is None else Merge(least, *best)


class _Listed:
    """The jobs of a search, each with its weight and, if it is asked for, as a group of its own."""

    def __init__(self, jobs: Sequence[Job], behind: int, gpus: int) -> None:
        self.jobs = jobs
        self.weights = weights(jobs, behind, gpus)
        self.fixed = {number for number, job in enumerate(jobs) if job.fixed}
        self.single: Computed[int, Group] = Computed(partial(_single, jobs, self.weights))


def _single(jobs: Sequence[Job], weights: Sequence[float], number: int) -> Group:
    job, weight = jobs[number], weights[number]
    kinds = () if job.kind is None else (job.kind,)
    return Group((number,), kinds, (weight,), weight, job.fixed, job.memory_mib, weight, weight)


class _Search:
    """One search from one starting point."""

    def __init__(self, listed: _Listed, gpus: int, tables: Tables, memory_mib: int, most: int) -> None:
        self._listed, self._jobs, self._weights = listed, listed.jobs, listed.weights
        self._tables, self._memory_mib, self._most = tables, memory_mib, most
        self.free = gpus
        self.buckets: dict[Hashable, _Bucket] = {}
        self._waiting: dict[Hashable, dict[int | None, list[int]]] = {}
        """Shape → kind → jobs, in order."""

    @property
    def value(self) -> float:
        return sum(group.value for bucket in self.buckets.values() for group in bucket.groups())

    def found(self) -> list[tuple[int, ...]]:
        """Members in order, groups by their first member."""
        return sorted(
            tuple(sorted(group.members)) for bucket in self.buckets.values() for group in bucket.groups()
        )

    def run(self, groups: Sequence[Sequence[int]], *, anew: bool) -> None:
        """Searches from these groups. `anew`: they are not an earlier plan."""
        taken: set[int] = set()
        for members in groups:
            taken.update(members)
            self._start(members)
        self._in_order(taken)
        self._replace(anew)
        for _ in range(MAX_ADMITTED):
            if not self._admit():
                break
        self._spread()

    def bucket(self, job: Job) -> _Bucket:
        found = self.buckets.get(job.shape)
        if found is None:
            found = self.buckets[job.shape] = _Bucket(job.gpus, self._tables, self._memory_mib, self._most)
        return found

    def _start(self, members: Sequence[int]) -> None:
        """Adds a current group."""
        jobs = self._jobs
        job = jobs[members[0]]
        if len(members) == 1:
            group = self._listed.single[members[0]]
        else:
            pairs = sorted([(kind, one) for one in members if (kind := jobs[one].kind) is not None])
            assert len(pairs) == len(members), members
            kinds, by_kind = tuple([kind for kind, _ in pairs]), tuple([one for _, one in pairs])
            weights = tuple([self._weights[one] for one in by_kind])
            value = sum(map(mul, self._tables.speeds(kinds), weights))
            fixed = not self._listed.fixed.isdisjoint(members)
            memory_mib = sum([jobs[number].memory_mib for number in members]) if self._memory_mib else 0
            group = group_of(by_kind, kinds, weights, value, fixed, memory_mib)
        self.bucket(job).add(group)
        self.free -= job.gpus

    def _in_order(self, taken: set[int]) -> None:
        """Step 1. If a job finds no group, later jobs of its shape and kind find none either: their weight is
        not larger, and GPUs only become fewer."""
        foreseen: dict[Hashable, int] = {}
        jobs, single, waiting = self._jobs[:MAX_IN_ORDER], self._listed.single, self._waiting
        for number, job in enumerate(jobs):
            if number in taken:
                continue
            if job.gpus <= self.free:
                self.free -= job.gpus
                self.bucket(job).add(single[number])
                continue
            shape, kind = job.shape, job.kind
            of_kind = waiting.get(shape)
            alike = None if of_kind is None else of_kind.get(kind)
            if alike is not None:
                alike.append(number)
                continue
            bucket = self.bucket(job)
            if kind is not None:
                if number >= foreseen.get(shape, 0) and len(bucket.of_kinds) * AHEAD >= MANY:
                    ahead = foreseen[shape] = number + AHEAD
                    bucket.foresee({one.kind for one in jobs[number:ahead] if one.shape == shape})
                new = single[number]
                joined = bucket.join(new)
                if joined is not None:
                    bucket.remove(joined[1])
                    bucket.add(bucket.united(joined[1], new))
                    continue
            waiting.setdefault(shape, {})[kind] = [number]

    def _replace(self, anew: bool) -> None:
        """Step 2: the first waiting job of each kind replaces the member for which that gains most."""
        for shape, of_kind in self._waiting.items():
            bucket = self.buckets[shape]
            tried = [kind for kind, numbers in of_kind.items() if anew or self._jobs[numbers[0]].new]
            self._tables.foresee(bucket.of_kinds, tried, instead=True)
            for place, kind in enumerate(tried):
                number = of_kind[kind][0]
                found = self._replaced(bucket, self._listed.single[number])
                if found is None:
                    continue
                group, rest, out = found
                bucket.remove(group)
                new = self._listed.single[number]
                changed = new if rest is None else bucket.united(rest, new)
                bucket.add(changed)
                self._tables.foresee([changed.kinds], tried[place:], instead=True)
                of_kind[kind].remove(number)
                if not of_kind[kind]:
                    del of_kind[kind]
                insort(of_kind.setdefault(self._jobs[out].kind, []), out)

    def _replaced(self, bucket: _Bucket, new: Group) -> tuple[Group, Group | None, int] | None:
        """(group, its remaining part, the member that leaves)."""
        best, found = ROUNDING, None
        jobs, memory_mib, weight = self._jobs, self._memory_mib, new.weights[0]
        replacements = self._tables.instead[new.kinds[0]] if new.kinds else {}
        for groups in (bucket.alone, *bucket.of_kinds.values()):
            if not groups:
                continue
            group = groups[0]
            value, weights, members = group.value, group.weights, group.members
            if len(members) == 1:
                if new.value - value > best and not jobs[members[0]].fixed:
                    best, found = new.value - value, (group, 0)
                continue
            if not new.kinds:
                continue
            heaviest = group.heaviest if group.heaviest > weight else weight
            instead, most = replacements[group.kinds]
            if heaviest * most - value <= best:
                continue
            for index, (speeds, own, total) in enumerate(instead):
                if heaviest * total - value <= best or (job := jobs[members[index]]).fixed:
                    continue
                if memory_mib and group.memory_mib - job.memory_mib + new.memory_mib > memory_mib:
                    continue
                gain = sum(map(mul, speeds, weights)) + own * weight - value
                if gain > best:
                    best, found = gain, (group, index)
        if found is None:
            return None
        group, index = found
        return group, self._rest(group, index), group.members[index]

    def _rest(self, group: Group, index: int) -> Group | None:
        """The group without one member; None: no member is left."""
        members = group.members[:index] + group.members[index + 1 :]
        if not members:
            return None
        kinds, speeds = self._tables.without(group.kinds, index)
        weights = group.weights[:index] + group.weights[index + 1 :]
        value = sum(map(mul, speeds, weights))
        fixed = not self._listed.fixed.isdisjoint(members)
        memory_mib = group.memory_mib - self._jobs[group.members[index]].memory_mib
        return group_of(members, kinds, weights, value, fixed, memory_mib)

    def _admit(self) -> bool:
        """Step 3: admits the group of waiting jobs that gains most, if any does."""
        best, found = ROUNDING, None
        for shape, of_kind in self._waiting.items():
            if not of_kind:
                continue
            new = self._grouped(self.buckets[shape], of_kind)
            freed = self._freed(self.buckets[shape].gpus, new.value - best)
            if freed is not None and new.value - freed[0] > best:
                best, found = new.value - freed[0], (shape, new, freed[1], freed[2])
        if found is None:
            return False
        shape, new, changed, left = found
        was = self._members(changed)
        self.buckets |= changed
        now = self._members(changed)
        self.free = left - self.buckets[shape].gpus
        self.buckets[shape].add(new)
        self._moved(new.members, was - now)
        return True

    def _members(self, shapes: Iterable[Hashable]) -> set[int]:
        """Jobs of these shapes that have GPUs."""
        return {
            number for shape in shapes for group in self.buckets[shape].groups() for number in group.members
        }

    def _moved(self, started: Iterable[int], dropped: Iterable[int]) -> None:
        """Updates the waiting jobs after an admission."""
        for number in started:
            job = self._jobs[number]
            of_kind = self._waiting[job.shape]
            of_kind[job.kind].remove(number)
            if not of_kind[job.kind]:
                del of_kind[job.kind]
        for number in sorted(dropped):
            job = self._jobs[number]
            insort(self._waiting.setdefault(job.shape, {}).setdefault(job.kind, []), number)

    def _grouped(self, bucket: _Bucket, of_kind: Mapping[int | None, Sequence[int]]) -> Group:
        """The first waiting job in order, with the jobs of the same shape that gain most with it."""
        first = min(numbers[0] for numbers in of_kind.values())
        group = self._listed.single[first]
        while group.kinds and len(group.members) < self._most:
            best, found, unions = ROUNDING, None, self._tables.unions[group.kinds]
            self._tables.foresee([group.kinds], of_kind)
            for kind, numbers in of_kind.items():
                if kind is None:
                    continue
                for number in numbers:
                    if number not in group.members:
                        break
                else:
                    continue
                new = self._listed.single[number]
                if self._memory_mib and group.memory_mib + new.memory_mib > self._memory_mib:
                    continue
                gain = value_of(unions[new.kinds], group, new) - group.value
                if gain > best:
                    best, found = gain, new
            if found is None:
                break
            group = bucket.united(group, found)
        return group

    def _freed(self, gpus: int, most: float) -> tuple[float, dict[Hashable, _Bucket], int] | None:
        """Frees so many GPUs: (loss, buckets that change, GPUs that are then free); None: the loss would be
        `most` or more."""
        free, loss = self.free, 0.0
        changed: dict[Hashable, _Bucket] = {}
        while free < gpus:
            best, found = inf, None
            for shape, bucket in self.buckets.items():
                merge = changed.get(shape, bucket).cheapest()
                if merge is None:
                    continue
                per_gpu = merge.loss / min(bucket.gpus, gpus - free)
                if per_gpu < best:
                    best, found = per_gpu, (shape, merge)
            if found is None:
                return None
            shape, merge = found
            loss += merge.loss
            if loss >= most:
                return None
            bucket = changed[shape] = changed.get(shape) or self.buckets[shape].copy()
            bucket.remove(merge.one)
            if merge.other is not None:
                bucket.remove(merge.other)
                bucket.add(bucket.united(merge.one, merge.other))
            free += bucket.gpus
        return loss, changed, free

    def _spread(self) -> None:
        """Step 4."""
        while self.free > 0:
            best, found = ROUNDING, None
            for bucket in self.buckets.values():
                if bucket.gpus > self.free:
                    continue
                for groups in bucket.of_kinds.values():
                    group = groups[-1]
                    if len(group.members) < 2:
                        continue
                    for index, member in enumerate(group.members):
                        if self._jobs[member].fixed:
                            continue
                        rest = self._rest(group, index)
                        assert rest is not None, group.members
                        gain = (rest.value + self._weights[member] - group.value) / bucket.gpus
                        if gain > best:
                            best, found = gain, (bucket, group, rest, member)
            if found is None:
                return
            bucket, group, rest, member = found
            bucket.remove(group)
            bucket.add(rest)
            bucket.add(self._listed.single[member])
            self.free -= bucket.gpus


def search(
    jobs: Sequence[Job],
    groups: Sequence[Sequence[int]],
    gpus: int,
    tables: Tables,
    *,
    afresh: bool,
    behind: int = 0,
    memory_mib: int = 0,
    max_members: int = MAX_GROUP_MEMBERS,
) -> list[tuple[int, ...]]:
    """The jobs that run, as groups of indexes into `jobs`, which are in order of priority.

    `groups`: the current groups, members of one shape each, on at most `gpus` GPUs in total. `afresh`: search
    from scratch, too. `behind`: number of further waiting jobs that are not listed, all of them behind these.
    `memory_mib`: of a GPU; 0: not bounded. Deterministic; O(jobs · kinds of groups).
    """
    if not gpus:
        return []
    listed = _Listed(jobs, behind, gpus)
    goes_on = _Search(listed, gpus, tables, memory_mib, max_members)
    goes_on.run(groups, anew=False)
    if not afresh:
        return goes_on.found()
    anew = _Search(listed, gpus, tables, memory_mib, max_members)
    anew.run([members for members in groups if not listed.fixed.isdisjoint(members)], anew=True)
    return (anew if anew.value > goes_on.value * (1 + STAY) else goes_on).found()
