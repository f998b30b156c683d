"""The placer's core alone, and the fold of its ledger: no IO, one core.

A cell of N nodes × 8 GPUs is filled to 90 %; then jobs exit and arrive in turn. Each event is answered as the
shell answers it: guard, fold, decide, fold the decisions, write the record's bytes.
"""

import gc
from collections import deque
from time import perf_counter

import numpy as np

from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import PlacementDecided, TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited, TaskStarted
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock_services.placer.core.recorder import Recorder
from tests.support.driver import job_spec, node_spec

GPUS_PER_NODE = 8
LOAD = 0.9
NO_CELL = 1_000  # a placer that takes over this ledger must not look for the inputs: they lie in no topic
SIZES = (1, 1, 1, 1, 2, 2, 4, 8)  # GPUs per worker; mostly small, as in published cluster traces
GANG_SHARE = 0.1  # of jobs are gangs of two to four workers


class CoreBench(Recorder):
    """One cell under load; `ledger` keeps every record's bytes."""

    def __init__(self, nodes: int, seed: int = 1, profile: str = "liquid", partition: int = NO_CELL) -> None:
        self.ledger: list[bytes] = []
        super().__init__(self.ledger.append, partition=partition)
        self.times_s: list[float] = []
        self.running: deque[str] = deque()
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._jobs = 0
        self._now_ms = 1_000_000
        self.step(TermStarted(term=1, placer_id="bench", settings=PlacerSettings(profile=profile, seed=seed)))
        for number in range(nodes):
            spec = node_spec(f"n{number:05}", GPUS_PER_NODE, rack=f"r{number // 32:04}", cores=64)
            self.step(NodeJoined(node=spec))
        self._gpus = nodes * GPUS_PER_NODE

    def step(self, event: Event) -> None:
        """Answers one input and keeps the time that it took."""
        self._now_ms += 1
        began = perf_counter()
        step = self.record(event, self._now_ms)
        self.times_s.append(perf_counter() - began)
        for fact in step.facts:
            if isinstance(fact, PlacementDecided):
                self.running.append(fact.job_id)

    def arrive(self) -> None:
        """One job is submitted, estimated, and, if placed, started."""
        self._jobs += 1
        job_id = f"j{self._jobs}"
        gpus = int(self._rng.choice(SIZES))
        workers = int(self._rng.integers(2, 5)) if self._rng.random() < GANG_SHARE else 1
        need = ResourceVector(gpus=gpus, cores=2 * gpus, host_memory_mib=2_048 * gpus, gpu_memory_mib=8_192)
        self.step(JobSubmitted(job_id=job_id, spec=job_spec(workers=workers)))
        self.step(
            JobEstimated(
                job_id=job_id, estimate=Estimate(worker=need, confidence=1, tier="user", source="bench")
            )
        )

    def depart(self) -> None:
        """The oldest running job starts (if it had not) and every task of it exits."""
        job = self.core.state.jobs[self.running.popleft()]
        for task_id, task in list(job.tasks.items()):
            node_id = task.place.node_id
            self.step(TaskStarted(node_id=node_id, task_id=task_id, token=job.token, pid=1, started_ms=1))
        for task_id, task in list(job.tasks.items()):
            self.step(
                TaskExited(
                    node_id=task.place.node_id,
                    task_id=task_id,
                    token=job.token,
                    cause="exited",
                    exit_code=0,
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

    def churn(self, events: int) -> None:
        """Arrivals and departures in turn, near the load."""
        held = len(self.running)
        self.times_s.clear()
        while len(self.times_s) < events:
            self.arrive()
            while len(self.running) > held:
                self.depart()


def measure(nodes: int, events: int = 20_000) -> tuple[float, float, CoreBench]:
    """(events/s, p99 ms, the bench) of the churn at 90 % load."""
    bench = CoreBench(nodes)
    bench.fill()
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
    began = perf_counter()
    for offset, value in enumerate(ledger):
        replica.take(value, offset)
    seconds = perf_counter() - began
    assert replica.head.seq == len(ledger), "every record is valid"
    return len(ledger) / seconds
