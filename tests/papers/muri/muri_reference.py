"""Muri's simulator in a few rules: a plain program that knows nothing of this scheduler, to judge what it
plans.

The rules are those of the published program, quirks included: an iteration takes 1.5 % longer than measured;
time is booked at events only; a job loses its start-up time once in each interval between events; completions
are predicted without that loss; GPUs are exclusive to a job or a group; CPU, memory and network never bind. 8
nodes of 8 GPUs unless said otherwise. Times are s.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.papers.muri.muri_reference_nodes import Nodes

SLOWER = 1.015
SAME = 1e-9
SAME_S = 1e-4
GROUP_FACTORS = {1: 1.0, 2: 1.33 / SLOWER, 3: 1.5 / SLOWER, 4: 1.37 / SLOWER}
GROUP_FACTORS_UNMATCHED = GROUP_FACTORS | {4: 1.30 / SLOWER}
LIMITS_GPU_S = (3_250.0, 7_200.0)

Stages = tuple[float, float, float]
"""(storage and CPU, GPU, network) of one iteration."""


class Job:
    """A row of the trace, and how far it is."""

    __slots__ = (
        "attained",
        "duration",
        "end",
        "gpus",
        "left",
        "level",
        "number",
        "overhead",
        "ran",
        "solo",
        "stages",
        "starts",
        "submit",
    )

    def __init__(
        self,
        number: int,
        gpus: int,
        submit: float,
        iterations: float,
        duration: float,
        solo: float,
        stages: Stages,
        overhead: float,
    ) -> None:
        self.number, self.gpus, self.submit, self.duration = number, gpus, submit, duration
        self.left, self.solo, self.stages, self.overhead = float(iterations), solo, stages, overhead
        self.attained, self.ran, self.level, self.end, self.starts = 0.0, False, 0, inf, 0

    @property
    def time_left(self) -> float:
        return self.left * self.solo if self.left > 0 else 0.0


def read(data: Path, trace: str, first: int | None = None) -> list[Job]:
    """Jobs of `trace-data/TRACE.csv` by submission; only so many of the `first`."""
    with (data / "stage_profiles.csv").open() as file:
        overheads = {
            (row["model"], row["num_gpu"]): float(row["startup_overhead_s"]) for row in csv.DictReader(file)
        }
    with (data / "trace-data" / f"{trace}.csv").open() as file:
        rows = list(csv.DictReader(file))[:first]
    jobs = [
        Job(
            number,
            int(row["num_gpu"]),
            float(row["submit_time"]) / 1_000,
            float(row["iterations"]),
            float(row["duration"]) / 1_000,
            float(row["iteration_time"]) * SLOWER / 1_000,
            (
                float(row["resource_time_0"]) / 1_000,
                float(row["resource_time_1"]) / 1_000,
                float(row["resource_time_2"]) / 1_000,
            ),
            overheads[row["model_name"], row["num_gpu"]],
        )
        for number, row in enumerate(rows)
    ]
    return sorted(jobs, key=lambda job: job.submit)


class Filled(NamedTuple):
    """`groups`: who runs together. `order`: the list as the next event finds it."""

    groups: Sequence[Sequence[Job]]
    order: list[Job]


class Policy(Protocol):
    """`coincide`: how close an arrival and a completion are one event: (relative, s)."""

    coincide: tuple[float, float]
    same: float
    """Relative distance of two ends in one batch."""

    def key(self, job: Job) -> float: ...
    def iteration(self, group: Sequence[Job]) -> float: ...
    def fill(self, jobs: list[Job], now: float) -> Filled: ...
    def wake(self, running: Iterable[Job], now: float) -> float: ...


class Sorted:
    """SRTF, SRSF: the smallest key first, first fit."""

    coincide = (0.0, 0.0)
    same = SAME

    def __init__(self, key: Callable[[Job], float], nodes: Sequence[int] = (8,) * 8) -> None:
        self.key = key
        self._nodes = nodes

    def iteration(self, group: Sequence[Job]) -> float:
        return group[0].solo

    def fill(self, jobs: list[Job], now: float) -> Filled:
        jobs.sort(key=self.key)
        nodes = Nodes(self._nodes)
        refused = inf
        running = []
        for job in jobs:
            if job.gpus < refused:
                if nodes.take(job.gpus):
                    running.append((job,))
                else:
                    refused = job.gpus
        return Filled(running, jobs)

    def wake(self, running: Iterable[Job], now: float) -> float:
        return inf


def srtf(nodes: Sequence[int] = (8,) * 8) -> Sorted:
    return Sorted(lambda job: job.time_left, nodes)


def srsf(nodes: Sequence[int] = (8,) * 8) -> Sorted:
    return Sorted(lambda job: job.time_left * job.gpus, nodes)


class Tiresias:
    """Three FIFO queues by attained service; one counter of GPUs."""

    coincide = (0.0, 0.0)
    same = 0.0

    def __init__(self, gpus: int = 64) -> None:
        self._gpus = gpus
        self._queues: list[list[Job]] = [[], [], []]
        self._known: set[int] = set()
        self._running: set[int] = set()

    def key(self, job: Job) -> float:
        return 0.0

    def iteration(self, group: Sequence[Job]) -> float:
        return group[0].solo

    def fill(self, jobs: list[Job], now: float) -> Filled:
        queues = self._queues
        alive = {job.number for job in jobs}
        for queue in queues:
            queue[:] = [job for job in queue if job.number in alive]
        for job in jobs:
            limit = LIMITS_GPU_S[job.level] if job.level < len(LIMITS_GPU_S) else inf
            if job.number in self._running and job.attained * job.gpus >= limit:
                queues[job.level].remove(job)
                job.level += 1
                queues[job.level].append(job)
        for job in jobs:
            if job.number not in self._known:
                self._known.add(job.number)
                queues[0].append(job)
        free = self._gpus
        self._running = set()
        groups = []
        for queue in queues:
            chosen, others = [], []
            for job in queue:
                if job.gpus <= free:
                    free -= job.gpus
                    chosen.append(job)
                else:
                    others.append(job)
            queue[:] = chosen + others
            groups += [(job,) for job in chosen]
            self._running.update(job.number for job in chosen)
        return Filled(groups, jobs)

    def wake(self, running: Iterable[Job], now: float) -> float:
        return min(
            (
                ceil(LIMITS_GPU_S[job.level] / job.gpus) - job.attained + now
                for job in running
                if job.level < len(LIMITS_GPU_S)
            ),
            default=inf,
        )


def period(group: Sequence[Stages], *, worst: bool = False) -> float:
    """Of an iteration of each of 2 – 4 members, in the best order."""
    found = []
    for members in permutations(group):
        reached = [0.0]
        result = None
        for i in range(8):
            ends = []
            for ahead, stage, back in ((1, 2, 0), (2, 1, 0), (3, 0, 1)):
                place = (i + ahead) % 4
                if place < len(members) and i >= back:
                    ends.append(reached[i - back] + members[place][stage])
            reached.append(max(ends))
            if i >= 4:
                now, before = reached[i + 1] - reached[i - 3], reached[i] - reached[i - 4]
                if abs(now - before) <= 1e-3 * before:
                    result = now
                    break
        found.append(reached[8] - reached[4] if result is None else result)
    if worst:
        return max(found)
    if len(group) == 2:
        (a0, b0, c0), (a1, b1, c1) = group
        found.append(max(a0, b1 + c1) + max(a1, b0 + c0))
    return min(found)


Match = Callable[[Sequence[Sequence[float]]], Iterable[tuple[int, int]]]
"""Symmetric weights → pairs of a maximum-weight matching."""


def blossom(weights: Sequence[Sequence[float]]) -> Iterable[tuple[int, int]]:
    """By rustworkx; weights to eight digits."""
    import rustworkx

    graph = rustworkx.PyGraph()
    graph.add_nodes_from(range(len(weights)))
    graph.add_edges_from(
        [
            (one, other, round(weights[one][other] * 1e8))
            for one in range(len(weights))
            for other in range(one)
            if weights[one][other] > 0
        ]
    )
    return rustworkx.max_weight_matching(graph, weight_fn=int)


class Muri:
    """Groups. `known`: Muri-S, else Muri-L. `match` None: without Blossom."""

    coincide = (SAME, SAME_S)
    same = SAME

    def __init__(
        self,
        *,
        known: bool,
        split: bool = True,
        match: Match | None = blossom,
        nodes: Sequence[int] = (8,) * 8,
    ) -> None:
        self._known, self._split, self._match, self._nodes = known, split, match, nodes
        self._factors = GROUP_FACTORS if match is not None else GROUP_FACTORS_UNMATCHED
        self._iterations: dict[tuple[Stages, ...], float] = {}

    def key(self, job: Job) -> float:
        if not self._known:
            return job.gpus * job.attained
        return job.gpus * (job.time_left if job.ran else job.duration)

    def iteration(self, group: Sequence[Job]) -> float:
        if len(group) == 1:
            return group[0].solo
        stages = tuple(sorted(job.stages for job in group))
        found = self._iterations.get(stages)
        if found is None:
            found = self._iterations[stages] = period(stages) * self._factors[len(stages)]
        return found

    def fill(self, jobs: list[Job], now: float) -> Filled:
        jobs.sort(key=self.key)
        total = sum(self._nodes)
        taken: dict[int, Job] = {}
        nodes = Nodes(self._nodes)
        by_gpus: dict[int, list[Job]] = {}
        for job in jobs:
            by_gpus.setdefault(job.gpus, []).append(job)
        refused = inf
        for job in jobs:
            if job.number in taken or job.gpus >= refused:
                continue
            if not nodes.take(job.gpus):
                refused = job.gpus
                continue
            left = 4
            for other in by_gpus[job.gpus]:
                if left and other.number not in taken:
                    taken[other.number] = other
                    left -= 1
        needed = sum(job.gpus for job in taken.values())
        groups: dict[int, list[tuple[Job, ...]]] = {
            gpus: [(job,) for job in those if job.number in taken] for gpus, those in by_gpus.items()
        }
        if self._match is None:
            found = self._unmatched(groups, needed, total)
        else:
            found = self._matched(groups, needed, total)
        whole: list[Sequence[Job]] = []
        for group in found:
            if self._split and self.iteration(group) > sum(job.solo for job in group):
                whole += [(job,) for job in group]
            else:
                whole.append(group)
        whole.sort(key=lambda group: min(self.key(job) for job in group))
        nodes = Nodes(self._nodes)
        running = [group for group in whole if nodes.take(group[0].gpus)]
        jobs.sort(key=lambda job: -job.gpus)
        return Filled(running, jobs)

    def _matched(
        self, groups: dict[int, list[tuple[Job, ...]]], needed: int, total: int
    ) -> list[tuple[Job, ...]]:
        assert self._match is not None
        for _ in range(4):
            if needed <= total:
                break
            for gpus, nodes in groups.items():
                weights = [[0.0] * len(nodes) for _ in nodes]
                for one, first in enumerate(nodes):
                    for other in range(one):
                        union = first + nodes[other]
                        if len(union) <= 4:
                            used = sum(sum(job.stages) for job in union)
                            weight = used / (4 * self.iteration(union))
                            weights[one][other] = weights[other][one] = weight
                partner = {max(pair): min(pair) for pair in self._match(weights)} if len(nodes) > 1 else {}
                merged: list[tuple[Job, ...]] = []
                apart: dict[int, tuple[Job, ...]] = dict(enumerate(nodes))
                for later in sorted(partner):
                    if needed > total:
                        apart[later] = apart.pop(partner[later]) + apart[later]
                        needed -= gpus
                merged = [apart[number] for number in sorted(apart)]
                groups[gpus] = merged
        return [group for nodes in groups.values() for group in nodes]

    @staticmethod
    def _unmatched(
        groups: dict[int, list[tuple[Job, ...]]], needed: int, total: int
    ) -> list[tuple[Job, ...]]:
        found: list[tuple[Job, ...]] = []
        for gpus, nodes in groups.items():
            for start in range(0, len(nodes), 4):
                first = nodes[start]
                for single in nodes[start + 1 : start + 4]:
                    if needed > total:
                        first += single
                        needed -= gpus
                    else:
                        found.append(single)
                found.append(first)
        return found

    def wake(self, running: Iterable[Job], now: float) -> float:
        return inf


class Result(NamedTuple):
    mean_jct: float
    makespan: float
    p99_jct: float
    restarts: float
    """Per job, beyond its first start; who stays with at least half of the members that it was with counts as
    not restarted."""
    events: int


class _Running(NamedTuple):
    members: Sequence[Job]
    iteration: float
    overhead: float


def simulate(jobs: Sequence[Job], policy: Policy) -> Result:
    """Until all have ended. `jobs` by submission; they are used up."""
    now, arrived, events = 0.0, 0, 0
    present: list[Job] = []
    running: list[_Running] = []
    batch: list[Job] = []
    batch_at = wake_at = inf
    while arrived < len(jobs) or present:
        before = now
        arrival = jobs[arrived].submit if arrived < len(jobs) else inf
        relative, absolute = policy.coincide
        both = arrival < inf and abs(arrival - batch_at) <= max(relative * arrival, absolute)
        now = arrival if both else min(arrival, batch_at, wake_at)
        assert now < inf, f"{len(present)} jobs wait for ever"
        ended = {job.number for job in batch} if both or batch_at <= now else set()
        for group in running:
            done = max(0.0, now - before - group.overhead) / group.iteration
            for job in group.members:
                if job.number in ended:
                    job.end = now
                else:
                    job.left -= done
                    job.attained = (job.attained + now) - before
        if ended:
            present = [job for job in present if job.number not in ended]
        while arrived < len(jobs) and jobs[arrived].submit <= now:
            present.append(jobs[arrived])
            arrived += 1
        events += 1
        filled = policy.fill(present, now)
        present = filled.order
        running = _start(running, filled.groups, policy)
        batch, batch_at = _next_batch(present, running, now, policy.same)
        wake_at = policy.wake((job for group in running for job in group.members), now)
        if wake_at >= min(batch_at, jobs[arrived].submit if arrived < len(jobs) else inf):
            wake_at = inf
    times = sorted(job.end - job.submit for job in jobs)
    return Result(
        sum(times) / len(times),
        max(job.end for job in jobs),
        times[int(0.99 * len(times))],
        sum(job.starts for job in jobs) / len(jobs) - 1,
        events,
    )


def _start(before: list[_Running], groups: Sequence[Sequence[Job]], policy: Policy) -> list[_Running]:
    was = {job.number: number for number, group in enumerate(before) for job in group.members}
    running = []
    kept: set[int] = set()
    for group in groups:
        parts: dict[int, int] = {}
        for job in group:
            if job.number in was and was[job.number] not in kept:
                parts[was[job.number]] = parts.get(was[job.number], 0) + 1
        stays = max(parts, key=lambda part: (parts[part], -part), default=-1)
        if stays >= 0:
            kept.add(stays)
        for job in group:
            if was.get(job.number, -2) != stays:
                job.starts += 1
            job.ran = True
        running.append(_Running(group, policy.iteration(group), sum(job.overhead for job in group)))
    return running


def _next_batch(
    order: Sequence[Job], running: Sequence[_Running], now: float, same: float
) -> tuple[list[Job], float]:
    iteration = {job.number: group.iteration for group in running for job in group.members}
    batches: list[tuple[float, list[Job]]] = []
    best = inf
    for job in order:
        if job.number not in iteration:
            continue
        end = now + job.left * iteration[job.number]
        if end > best * (1 + 4 * same):
            continue
        for first, members in batches:
            if abs(end - first) <= same * end:
                members.append(job)
                break
        else:
            batches.append((end, [job]))
            best = min(best, end)
    if not batches:
        return [], inf
    at, members = min(batches, key=lambda one: one[0])
    return members, at
