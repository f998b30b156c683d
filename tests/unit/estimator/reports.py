"""Jobs that report their phases and steps, as a ledger and the estimator's fold of it; and such runs made up,
by the hundred."""

from typing import Any, Literal

import numpy as np

from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import NodeJoined, StepsMeasured, TaskPhaseChanged, TaskStarted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.eta_updates import EtaUpdates
from penstock_services.estimator.core.fold.progress import Progress
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import Allocation, Card, FinishedRun, Steps, job_info
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.core.step_time.run_time import StepTier
from tests.support.cluster.driver import node_spec
from tests.unit.estimator.service.test_estimator import Cell, usage

JOB = JobSpec(owner="ada", command=("python", "train.py"), model="resnet50", batch_size=64, iterations=1_000)


class Reports(Cell):
    """Tasks are `JOB/ATTEMPT/RANK`; the node's clock shows the ledger's time less an hour."""

    OFF_MS = 3_600_000

    def __init__(self) -> None:
        super().__init__()
        self.ledger = State(Topic.JOBS, 0)
        self.ledger.fold(self.values[0])
        for number in range(2):
            self.record(NodeJoined(node=node_spec(f"node-{number + 1}", 8, model="T4", memory_mib=15_360)))

    @property
    def stored(self) -> list[FinishedRun]:
        return self.ledger.finished

    @property
    def node_ms(self) -> int:
        return self.now_ms - self.OFF_MS

    def begin(
        self,
        job_id: str,
        ring: tuple[int, ...] = (2,),
        attempt: int = 1,
        spec: JobSpec = JOB,
        early_ms: tuple[int, int] | None = None,
    ) -> None:
        """Submitted, placed with a worker per entry of the ring on a node each, and started. `early_ms`: how
        long it launched before its GPUs were free, and then waited for them."""
        if attempt == 1:
            self.submit(job_id, spec)
            self.record(JobEstimated(job_id=job_id, estimate=estimate(spec, ())))
        tasks = tuple(
            TaskPlacement(
                task_id=f"{job_id}/{attempt}/{rank}",
                role="worker",
                rank=rank,
                node_id=f"node-{rank + 1}",
                gpus=tuple(range(gpus)),
            )
            for rank, gpus in enumerate(ring)
        )
        self.record(*self.over(job_id), PlacementDecided(job_id=job_id, attempt=attempt, tasks=tasks))
        started_ms, opened_ms = self.node_ms, None
        if early_ms is not None:
            launch_ms, wait_ms = early_ms
            self.phase(job_id, "ready", launch_ms, attempt)
            self.now_ms += wait_ms
            opened_ms = self.node_ms
        for task in tasks:
            self.record(
                TaskStarted(
                    node_id=task.node_id,
                    task_id=task.task_id,
                    token=1,
                    pid=1,
                    started_ms=started_ms,
                    opened_ms=opened_ms,
                )
            )

    def phase(
        self,
        job_id: str,
        phase: Literal["launch", "ready", "train", "save"],
        after_ms: int = 0,
        attempt: int = 1,
        rank: int = 0,
    ) -> None:
        self.now_ms += after_ms
        task_id = f"{job_id}/{attempt}/{rank}"
        self.record(
            TaskPhaseChanged(
                node_id=self.node_of(task_id),
                task_id=task_id,
                token=1,
                phase=phase,
                at_ms=self.node_ms,
            )
        )

    def report(
        self,
        job_id: str,
        done: int,
        steps: int = 0,
        step_ms: float = 0.0,
        attempt: int = 1,
        lasted_ms: int | None = None,
        **more: Any,
    ) -> None:
        """After the time that the window took, unless it is said that another one passed."""
        self.now_ms += round(steps * step_ms) if lasted_ms is None else lasted_ms
        task_id = f"{job_id}/{attempt}/0"
        self.record(
            StepsMeasured(
                node_id=self.node_of(task_id),
                task_id=task_id,
                token=1,
                at_ms=self.node_ms,
                done=done,
                steps=steps,
                step_ms=step_ms,
                **more,
            )
        )

    def end(self, job_id: str, run_ms: int = 60_000, attempt: int = 1) -> None:
        self.exit(job_id, usage(), run_ms, attempt=attempt)
        self.record(JobEnded(job_id=job_id, outcome="succeeded"))

    def progress(self, job_id: str) -> Progress:
        found = self.ledger.live[job_id].progress
        assert found is not None
        return found


def ran(
    seq: int,
    owner: str = "ada",
    network: str = "resnet50",
    ring: tuple[int, ...] = (1,),
    batch: int = 64,
    step_ms: float = 100.0,
    iterations: float = 1_000.0,
    command: str = "train.py",
    curve: tuple[tuple[float, float], ...] = (),
) -> FinishedRun:
    """A finished run on T4 cards."""
    spec = JobSpec(owner=owner, command=("python", command), model=network, batch_size=batch)
    measured = Run(
        ended_ms=1_000 * seq,
        seq=seq,
        run_ms=iterations * step_ms,
        gpus=ring[0],
        total_gpus=sum(ring),
        iterations=iterations,
        step_ms=step_ms,
        launch_ms=3_000,
        train_ms=iterations * step_ms,
        save_ms=1_000,
    )
    allocation = Allocation(ring[0], 1_000, 4, Card("T4", 15_360))
    return FinishedRun(
        seq, f"job-{seq}", job_info(spec), allocation, None, measured, "", Steps(ring, (step_ms,) * 4, curve)
    )


def true_ms(ring: tuple[int, ...], batch: int) -> float:
    """What a step of the made-up network takes: computing, and synchronising."""
    gpus = sum(ring)
    return 20 + 3 * batch / gpus + (0 if gpus == 1 else 15 * len(ring) * gpus**0.3)


def month(count: int, owners: tuple[str, ...] = ("ada", "bob", "eve")) -> list[FinishedRun]:
    """Runs of one network with a noise of 3 %."""
    rng = np.random.default_rng(1)
    found = []
    for seq in range(1, count + 1):
        ring = ((1,), (2,), (4,), (4, 4), (2, 2))[int(rng.integers(5))]
        batch, owner = int(2 ** rng.integers(4, 8)), owners[int(rng.integers(len(owners)))]
        step_ms = true_ms(ring, batch) * float(np.exp(rng.normal(0, 0.03)))
        found.append(ran(seq, owner, ring=ring, batch=batch, step_ms=step_ms, command=f"{seq % 7}.py"))
    return found


def updates_of(state: State) -> EtaUpdates:
    """With a tier of its own, which has no model yet."""
    return EtaUpdates(state, StepTier(state.history, state.nearest, state.nodes))
