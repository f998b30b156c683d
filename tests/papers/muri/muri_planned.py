"""A regroup stage under the rules of Muri's simulator: what `solve` answers is judged by
`tests.papers.muri.muri_reference`."""

from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter

from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.candidates import place_in_queue
from penstock.scheduling.stages.regroup import Answer, Candidate, Question
from penstock_papers.muri.list_order import place_in_list
from tests.papers.muri.muri_reference import SAME, SAME_S, SLOWER, Filled, Job, Muri

Solve = Callable[[Question], Answer]
Profiled = Callable[[Job], tuple[float, float, float, float]]
"""(storage, CPU, GPU, network) of an iteration in ms, as the estimator has it."""


def measured(job: Job) -> tuple[float, float, float, float]:
    """The truth, storage and CPU in one."""
    storage_cpu, gpu, network = job.stages
    return storage_cpu * 1_000, 0.0, gpu * 1_000, network * 1_000


class Planned:
    """`key`: by which jobs come in the stage's order. `known`: whether remaining times are. `listed`: so many
    of those who wait, in all."""

    coincide = (SAME, SAME_S)
    same = SAME

    def __init__(
        self,
        solve: Solve,
        key: Callable[[Job], float],
        *,
        known: bool,
        profiled: Profiled = measured,
        nodes: Sequence[int] = (8,) * 8,
        per_shape: int | None = None,
        listed: int | None = None,
        truth: Muri | None = None,
    ) -> None:
        self._solve, self.key, self._known, self._profiled = solve, key, known, profiled
        self._nodes, self._per_shape, self._listed = tuple(nodes), per_shape, listed
        self._truth = truth or Muri(known=known)
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._group: dict[int, str] = {}
        self._stages: dict[int, StageTimes] = {}
        self._events = 0
        self.planning_s = 0.0
        self.ranks = 0
        self._wake = float("inf")

    def iteration(self, group: Sequence[Job]) -> float:
        return self._truth.iteration(group)

    def wake(self, running: object, now: float) -> float:
        return self._wake if self._wake > now else float("inf")

    def fill(self, jobs: list[Job], now: float) -> Filled:
        self._events += 1
        in_order = sorted(jobs, key=self._place)
        listed = self._cut(in_order)
        question = Question(
            stage="judged",
            jobs=tuple(self._candidate(job) for job in listed),
            node_gpus=self._nodes,
            gpu_memory_mib=0,
            now_ms=int(now * 1_000),
            behind=len(jobs) - len(listed),
        )
        began = perf_counter()
        answer = self._solve(question)
        self.planning_s += perf_counter() - began
        wakes = (answer.wake_ms, answer.started_wake_ms)
        self._wake = min(float("inf") if at_ms is None else at_ms / 1_000 for at_ms in wakes)
        by_id = {str(job.number): job for job in listed}
        groups = [[by_id[job_id] for job_id in group.job_ids] for group in answer.groups]
        self.ranks += len(answer.ranks)
        for rank in answer.ranks:
            self._seen[int(rank.job_id)] = (rank.level, 0 if rank.chosen else 1, rank.position)
        self._group = {
            job.number: f"{self._events}-{number}" for number, group in enumerate(groups) for job in group
        }
        return Filled(groups, jobs)

    def _place(self, job: Job) -> tuple[object, ...]:
        if self._listed is not None:
            place = place_in_queue(self._seen.get(job.number))
            return self.key(job), job.number not in self._group, place, job.number
        new, position = place_in_list(self._seen.get(job.number), job.number)
        return self.key(job), new, -job.gpus, position, job.number

    def _cut(self, jobs: Sequence[Job]) -> list[Job]:
        """As the product's questions: all that run, and the first of those who wait."""
        if self._listed is not None:
            waiting = islice((job for job in jobs if job.number not in self._group), self._listed)
            kept = {job.number for job in waiting} | self._group.keys()
            return [job for job in jobs if job.number in kept]
        if self._per_shape is None:
            return list(jobs)
        counts: dict[int, int] = {}
        total = sum(self._nodes)
        found = []
        for job in jobs:
            if job.number not in self._group:
                counts[job.gpus] = counts.get(job.gpus, 0) + 1
                if counts[job.gpus] > self._per_shape * (total // job.gpus):
                    continue
            found.append(job)
        return found

    def _candidate(self, job: Job) -> Candidate:
        stages = self._stages.get(job.number)
        if stages is None:
            storage, cpu, gpu, network = self._profiled(job)
            stages = self._stages[job.number] = StageTimes(
                storage_ms=storage,
                cpu_ms=cpu,
                gpu_ms=gpu,
                network_ms=network,
                iteration_ms=job.solo / SLOWER * 1_000,
            )
        workers = max(1, job.gpus // 8)
        remaining = job.time_left if job.ran else job.duration
        return Candidate(
            job_id=str(job.number),
            gpus=job.gpus,
            shape=(workers, job.gpus // workers, 0, 0),
            stages=stages,
            remaining_s=remaining if self._known else float("inf"),
            attained_s=job.attained,
            order=job.number,
            rank=self._seen.get(job.number),
            group=self._group.get(job.number, ""),
            movable=True,
            stop_cost_s=0.0,
            gpu_memory_mib=0,
        )


def service_left(job: Job) -> float:
    """SRSF as Muri-S has it."""
    return job.gpus * (job.time_left if job.ran else job.duration)


def service_attained(job: Job) -> float:
    return job.gpus * job.attained
