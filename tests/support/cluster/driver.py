"""Drives the placer's core by hand, as its shell would, and checks everything after every step.

Each step's record is written, read back by a second fold (the fast decoder of followers), and both states
must be sound and agree.
"""

from collections.abc import Sequence
from typing import Any

from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.ledger_events import PlacementExplanation, TermStarted, TimerFired
from penstock.model.decisions.orders import Order, StartTask
from penstock.model.inputs.estimates import Bounds, EtaEstimated, JobEstimated
from penstock.model.inputs.external_events import (
    JobSubmitted,
    NodeJoined,
    RunningTask,
    TaskExited,
    TaskStarted,
)
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.environment import task_environment
from penstock_services.placer.core.orders import outstanding
from penstock_services.placer.core.recorder import Recorder
from penstock_services.placer.core.step import Step


def node_spec(
    node_id: str,
    gpus: int = 4,
    *,
    rack: str = "r0",
    boot: str = "b1",
    model: str = "V100",
    memory_mib: int = 16_384,
    cores: int = 32,
) -> NodeSpec:
    """A node of equal GPUs with 128 GiB of memory."""
    return NodeSpec(
        node_id=node_id,
        boot_id=boot,
        rack=rack,
        cores=cores,
        host_memory_mib=131_072,
        gpus=tuple(
            Gpu(index=i, uuid=f"GPU-{node_id}-{i}", model=model, memory_mib=memory_mib) for i in range(gpus)
        ),
    )


def job_spec(
    *,
    workers: int = 1,
    ps: int = 0,
    attempts: int = 1,
    backoff_ms: int = 1_000,
    models: Sequence[str] = (),
    **times: Any,
) -> JobSpec:
    return JobSpec(
        command=("python", "train.py"),
        workers=workers,
        parameter_servers=ps,
        gpu_models=tuple(models),
        resources=ResourceRequest(),
        retry=RetryPolicy(max_attempts=attempts, backoff_ms=backoff_ms),
        **times,  # queue_timeout_ms, run_timeout_ms, grace_ms
    )


def estimate(
    gpus: int = 1, *, cores: int = 2, memory_mib: int = 1_024, gpu_memory_mib: int = 1_024
) -> Estimate:
    return Estimate(
        worker=ResourceVector(
            gpus=gpus, cores=cores, host_memory_mib=memory_mib, gpu_memory_mib=gpu_memory_mib
        ),
        confidence=1.0,
        tier="user",
        source="a test",
    )


def eta(job_id: str, at_ms: int, left_ms: float, attempt: int = 1) -> EtaEstimated:
    """The estimator says how long a job still takes."""
    one, left = (Bounds(middle=value, low=value, high=value) for value in (1.0, left_ms))
    return EtaEstimated(
        job_id=job_id,
        attempt=attempt,
        at_ms=at_ms,
        done=1,
        left_ms=left,
        steps=one,
        step_ms=one,
        level=0.9,
        source="x",
    )


class CellDriver(Recorder):
    """One cell: `feed` events, read the facts; time moves only by `at`."""

    def __init__(self, settings: PlacerSettings | None = None) -> None:
        self.follower = Replica()
        self.values: list[bytes] = []
        super().__init__(self.values.append)
        self.now_ms = 1_000_000
        self.explanations: list[PlacementExplanation] = []
        self.feed(TermStarted(term=1, placer_id="p1", settings=settings or PlacerSettings()))

    def job(self, job_id: str) -> JobState:
        return self.state.jobs[job_id]

    def feed(self, event: Event) -> Step:
        """One input, timer or term; returns what the ledger record holds."""
        step = self.record(event, self.now_ms)
        self.explanations += step.explanation
        taken = self.follower.take(self.values[-1], len(self.values) - 1)
        assert taken is not None, "our own record must be valid"
        for who, state in (("placer", self.state), ("follower", self.follower.state)):
            assert check(state) == [], f"{who} after seq {self.head.seq}: {check(state)}"
        assert self.follower.head == self.head
        return step

    def at(self, now_ms: int) -> list[Step]:
        """Lets time pass until `now_ms` after the start; fires every timer that comes due, in order."""
        until = 1_000_000 + now_ms
        steps = []
        while (due := self.state.next_timer()) is not None and due[0] <= until:
            self.now_ms = max(self.now_ms, due[0])
            steps.append(self.feed(TimerFired(timer_id=due[1])))
        self.now_ms = until
        return steps

    # Shorthands of what nodes and users do ------------------------------------------------------------

    def join(self, *specs: NodeSpec, tasks: Sequence[RunningTask] = ()) -> None:
        for spec in specs:
            self.feed(NodeJoined(node=spec, tasks=tuple(tasks)))

    def submit(self, job_id: str, spec: JobSpec | None = None, need: Estimate | None = None) -> Step:
        """Submission and estimate; returns the step that queued it."""
        self.feed(JobSubmitted(job_id=job_id, spec=spec or job_spec()))
        return self.feed(JobEstimated(job_id=job_id, estimate=need or estimate()))

    def start(self, job_id: str) -> None:
        """Every task of the job reports its start."""
        for task_id, task in list(self.job(job_id).tasks.items()):
            self.feed(
                TaskStarted(
                    node_id=task.place.node_id,
                    task_id=task_id,
                    token=self.job(job_id).token,
                    pid=7,
                    started_ms=self.now_ms,
                )
            )

    def exit(
        self,
        task_id: str,
        code: int | None = 0,
        *,
        cause: Any = "exited",
        signal: int | None = None,
        detail: str = "",
    ) -> Step:
        """One task ends."""
        job = self.job(task_id.rsplit(".", 2)[0])
        return self.feed(
            TaskExited(
                node_id=job.tasks[task_id].place.node_id,
                task_id=task_id,
                token=job.token,
                cause=cause,
                exit_code=code,
                signal=signal,
                started_ms=self.now_ms,
                exited_ms=self.now_ms,
                detail=detail,
            )
        )

    def orders(self) -> list[Order]:
        """What the nodes have been asked and have not answered."""
        return list(outstanding(self.state, sorted(self.state.nodes), self.head.seq))

    def environments(self, job_id: str, **how: bool) -> list[dict[str, str]]:
        """What each task of the job finds when its node starts it, in order of the ranks. `how`: as
        `task_environment`."""
        orders = [one for one in self.orders() if isinstance(one, StartTask) and one.job_id == job_id]
        orders.sort(key=lambda order: order.place.rank)
        how = {"virtual": False, **how}
        nodes = self.state.nodes
        return [task_environment(order, nodes[order.node_id].spec, {}, {}, **how) for order in orders]


def kinds(step: Step) -> list[str]:
    """The facts of a step by their short type names, for exact comparison."""
    return [fact.TYPE.removeprefix("penstock.") for fact in step.facts]
