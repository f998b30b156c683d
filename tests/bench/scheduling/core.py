"""The placer's core alone, and the fold of its ledger: no IO, one core.

A cell of N nodes × 8 GPUs is filled to 90 %, or, contended, until so many jobs wait; then jobs exit and
arrive in turn. Each event is answered as the shell answers it: guard, fold, decide, fold the decisions, write
the record's bytes. Times are those of the processor.
"""

import gc
from collections import deque
from time import process_time
from typing import Literal

import numpy as np
from msgspec.structs import replace

from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import PlacementDecided, StopDecided, TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited, TaskStarted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock_services.placer.core.recorder import Recorder
from tests.bench.cases import HISTORY, Case
from tests.support.cluster.driver import job_spec, node_spec

GPUS_PER_NODE = 8
LOAD = 0.9
NO_CELL = 1_000  # a placer that takes over this ledger must not look for the inputs: they lie in no topic
SIZES = (1, 1, 1, 1, 2, 2, 4, 8)  # GPUs per worker; mostly small, as in published cluster traces
GANG_SHARE = 0.1  # of jobs are gangs of two to four workers
WAITING = 4_500  # jobs of a standing queue
TENANTS = 20
SHORTEST_MS, LONGEST_MS = 60_000.0, 86_400_000.0  # run times, evenly by their logarithm


class CoreBench(Recorder):
    """One cell under load; `ledger` keeps every record's bytes.

    Under other profiles than that of the history, jobs have tenants and run times.
    """

    def __init__(self, nodes: int, seed: int = 1, profile: str = HISTORY, partition: int = NO_CELL) -> None:
        self.ledger: list[bytes] = []
        super().__init__(self.ledger.append, partition=partition)
        self.times_s: list[float] = []
        self.running: deque[str] = deque()
        self._rng, self._users = (np.random.Generator(np.random.PCG64(each)) for each in (seed, seed + 1))
        self._plain = profile == HISTORY
        self._jobs = 0
        self._now_ms = 1_000_000
        self.step(TermStarted(term=1, placer_id="bench", settings=PlacerSettings(profile=profile, seed=seed)))
        for number in range(nodes):
            spec = node_spec(f"n{number:05}", GPUS_PER_NODE, rack=f"r{number // 32:04}", cores=64)
            self.step(NodeJoined(node=spec))
        self._gpus = nodes * GPUS_PER_NODE

    def step(self, event: Event) -> None:
        """Answers one input and keeps the time that it took; nodes obey stops at once."""
        self._now_ms += 1
        began = process_time()
        step = self.record(event, self._now_ms)
        self.times_s.append(process_time() - began)
        for fact in step.facts:
            if isinstance(fact, PlacementDecided):
                self.running.append(fact.job_id)
        for fact in step.facts:
            if isinstance(fact, StopDecided):
                self.running.remove(fact.job_id)
                self._exit(fact.job_id, "stopped")

    def arrive(self) -> None:
        """One job is submitted and estimated."""
        self._jobs += 1
        job_id = f"j{self._jobs}"
        gpus = int(self._rng.choice(SIZES))
        workers = int(self._rng.integers(2, 5)) if self._rng.random() < GANG_SHARE else 1
        need = ResourceVector(gpus=gpus, cores=2 * gpus, host_memory_mib=2_048 * gpus, gpu_memory_mib=8_192)
        estimate = Estimate(worker=need, confidence=1, tier="user", source="bench")
        spec = job_spec(workers=workers)
        if not self._plain:
            spec, estimate = self._of_a_tenant(spec, estimate)
        self.step(JobSubmitted(job_id=job_id, spec=spec))
        self.step(JobEstimated(job_id=job_id, estimate=estimate))

    def _of_a_tenant(self, spec: JobSpec, estimate: Estimate) -> tuple[JobSpec, Estimate]:
        """The job of some tenant, with a known run time."""
        spread = np.log(LONGEST_MS / SHORTEST_MS)
        run_ms = int(SHORTEST_MS * np.exp(self._users.random() * spread))
        owner = f"tenant-{self._users.integers(TENANTS)}"
        return replace(spec, owner=owner), replace(estimate, run_ms=run_ms)

    def depart(self) -> None:
        """The oldest running job starts (if it had not) and every task of it exits."""
        job_id = self.running.popleft()
        self.start(job_id)
        self._exit(job_id, "exited")

    def start(self, job_id: str) -> None:
        """Its tasks report their start."""
        job = self.core.state.jobs[job_id]
        for task_id, task in list(job.tasks.items()):
            node_id = task.place.node_id
            self.step(TaskStarted(node_id=node_id, task_id=task_id, token=job.token, pid=1, started_ms=1))

    def _exit(self, job_id: str, cause: Literal["exited", "stopped"]) -> None:
        job = self.core.state.jobs[job_id]
        for task_id, task in list(job.tasks.items()):
            self.step(
                TaskExited(
                    node_id=task.place.node_id,
                    task_id=task_id,
                    token=job.token,
                    cause=cause,
                    exit_code=0 if cause == "exited" else None,
                    signal=None if cause == "exited" else 15,
                    started_ms=1,
                    exited_ms=2,
                )
            )

    def used(self) -> float:
        """Share of GPUs that are given out."""
        free = sum(node.free_gpu_mask.bit_count() for node in self.core.state.nodes.values())
        return 1 - free / self._gpus

    def fill(self) -> None:
        while self.used() < LOAD:
            for _ in range(max(1, self._gpus // 200)):
                self.arrive()

    def queue_up(self, waiting: int) -> None:
        """Arrivals until so many jobs wait."""
        while len(self.core.state.queue) < waiting:
            self.arrive()

    def churn(self, events: int) -> None:
        """Arrivals and departures in turn: near the load, or near the length of the queue where there is
        one."""
        held, waiting = len(self.running), len(self.core.state.queue)
        self.times_s.clear()
        while len(self.times_s) < events:
            self.arrive()
            self.queue_up(waiting)
            while len(self.core.state.queue) > waiting or (not waiting and len(self.running) > held):
                self.depart()


def prepared(case: Case, nodes: int, waiting: int = WAITING) -> CoreBench:
    """A cell with its load and, contended, its queue."""
    bench = CoreBench(nodes, profile=case.profile)
    bench.fill()
    if case.contended:
        bench.queue_up(waiting)
    return bench


def measure(
    case: Case, nodes: int, events: int = 20_000, waiting: int = WAITING
) -> tuple[float, float, CoreBench]:
    """(events/s, p99 ms, the bench) of the churn at this load."""
    bench = prepared(case, nodes, waiting)
    gc.collect()
    gc.freeze()
    bench.churn(events)
    gc.unfreeze()
    problems = check(bench.core.state)
    assert not problems, problems[:3]
    times_ms = np.array(bench.times_s) * 1_000
    return len(times_ms) / (times_ms.sum() / 1_000), float(np.percentile(times_ms, 99)), bench


def fold_rate(ledger: list[bytes]) -> float:
    """Records/s of a follower's fold over this ledger, from the first record."""
    replica = Replica()
    began = process_time()
    for offset, value in enumerate(ledger):
        replica.take(value, offset)
    seconds = process_time() - began
    assert replica.head.seq == len(ledger), "every record is valid"
    return len(ledger) / seconds
