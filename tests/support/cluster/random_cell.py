"""A cell under random jobs, users and operators, played until nothing can happen any more: for judges that
know nothing of policies."""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from infra.codegen.examples import EXAMPLES
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.ledger_events import TermStarted, TimerFired
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobHoldRequested,
    JobReleaseRequested,
    JobSubmitted,
    NodeCordoned,
    NodeJoined,
    NodeSuspected,
    NodeUncordoned,
    RunningTask,
    TaskExited,
    TaskPhaseChanged,
    TaskStarted,
    WorkProgressed,
)
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import MAX_OVERTAKES, Coda, PlacerSettings, Stage
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import MAX_MS, Estimate, ResourceVector, ShapeOption
from penstock.model.schema.event import Event
from penstock.model.schema.topics import INPUT_TOPICS
from penstock.scheduling.liveness import Undelaying, stalled
from penstock_services.placer.core.recorder import Recorder
from penstock_services.placer.core.step import PlacerCore, Step
from tests.support.cluster.driver import node_spec
from tests.support.cluster.extremes import about, at_its_ends
from tests.support.cluster.readers import Readers

YEAR_MS = 365 * 86_400_000
LIVE = (TaskStatus.ASSIGNED, TaskStatus.RUNNING, TaskStatus.STOPPING)
QUIET = 400  # timers in a row that change nothing: then none will
DISTURBED = 0.05
"""Rate of acts of users and operators, per step."""
ARRIVES = 0.7
"""Rate of steps in which jobs arrive, rather than a task starts or ends: the queue grows to nearly all
jobs."""
JUDGED_EVERY = 8
"""Steps until the cell is asked again whether it stalls: of a stall that lasts nearly each is seen."""
FOREIGN = [event for event in EXAMPLES.values() if event.TOPIC in INPUT_TOPICS]
"""One of each kind of input."""
OF_RUNNING = [
    event for event in FOREIGN if isinstance(event, EtaEstimated | TaskPhaseChanged | WorkProgressed)
]
"""What sets times of jobs that run: half of those that are fed."""
T = TypeVar("T")


class RandomCell(Recorder):
    """One to four nodes of two models, and `jobs` jobs of all kinds. Every job that starts ends; every node
    that is cordoned comes back, every job that is held is released."""

    def __init__(
        self,
        seed: int,
        settings: PlacerSettings,
        jobs: int,
        *,
        fresh_every: int = 0,
        arrives: float = ARRIVES,
        extremes: float = 0.0,
    ) -> None:
        """`fresh_every`: each record whose number it divides is also decided by a fresh decider, from a
        snapshot; 0: none is. `extremes`: rate of inputs with numbers at the ends of their ranges, and of
        inputs of any kind; every reader reads what is written then."""
        self.readers = Readers() if extremes else None
        super().__init__(self.written)
        self.fresh_every, self.arrives, self.extremes = fresh_every, arrives, extremes
        self.compared, self.steps = 0, 0
        self.seed = seed
        self.undelaying = Undelaying()
        self.ends = np.random.default_rng([seed, 1])
        self.rng = np.random.default_rng(seed)
        self.now_ms = 1_000_000
        self.submitted, self.jobs = 0, jobs
        self.cordoned: set[str] = set()
        self.held: set[str] = set()
        self.silent: set[str] = set()
        """Nodes that are silent, or have lost a GPU."""
        self.longest_queue = 0
        self.feed(TermStarted(term=1, placer_id="p1", settings=settings))
        for number in range(int(self.rng.integers(1, 5))):
            gpus, cores = int(self.rng.choice([1, 2, 4, 8])), int(self.rng.choice([8, 16, 32]))
            model = str(self.rng.choice(["V100", "A100"]))
            self.feed(self._joining(node_spec(f"n{number}", gpus, cores=cores, model=model)))

    def written(self, value: bytes) -> None:
        """One record, as it is in the log."""
        if self.readers is not None:
            self.readers.take(value)

    def _joining(self, spec: NodeSpec) -> NodeJoined:
        """The first one of a node."""
        return NodeJoined(node=spec)

    def feed(self, event: Event) -> Step:
        own = isinstance(event, TermStarted | TimerFired)
        if not own and self.ends.random() < self.extremes:
            event = at_its_ends(event, self.ends)
        every, twin = self.fresh_every, None
        if every and self.head.seq % every == 0 and self.head.seq:
            twin = Recorder()
            twin.core, twin.head = PlacerCore(load(dump(self.state))), self.head
        step = self.record(event, self.now_ms)
        if twin is not None:
            self.compared += 1
            other = twin.record(event, self.now_ms)
            assert list(other.facts) == list(step.facts), f"a fresh decider, record {self.head.seq}"
            assert list(other.explanation) == list(step.explanation), f"record {self.head.seq}"
            assert twin.head == self.head
        return step

    def run(self) -> list[str]:
        """Jobs that still wait when nothing can happen any more, and were not told that they can never
        run."""
        quiet = 0
        while quiet < QUIET and self._step():
            self.longest_queue = max(self.longest_queue, len(self.state.queue))
            self.steps += 1
            if self.steps % JUDGED_EVERY == 0 and not self.extremes:
                found = stalled(self.state, self.undelaying)
                assert found is None, f"record {self.head.seq}: {found}"
            quiet = 0 if self.submitted < self.jobs or self.state.holding else quiet + 1
        return [job.job_id for job in self.state.jobs.values() if job.in_line]

    def _step(self) -> bool:
        """Something that may happen does; False: nothing can."""
        while (due := self.state.next_timer()) is not None and due[0] <= self.now_ms:
            self._fire()
        self.now_ms += int(self.rng.exponential(3_000))
        if (self.submitted < self.jobs or self.state.holding) and self.ends.random() < self.extremes:
            found = FOREIGN if self.ends.random() < 0.5 else OF_RUNNING
            self.feed(about(self.state, found[int(self.ends.integers(len(found)))], self.ends))
        if self.submitted < self.jobs:
            if self.rng.random() < DISTURBED:
                self._disturb()
            if self.rng.random() < self.arrives or not self.state.holding:
                for _ in range(min(self.jobs - self.submitted, int(self.rng.choice([1, 1, 5, 80])))):
                    self._submit()
                return True
        elif self.cordoned or self.held or self.silent:
            self._undisturb()
        if self.rng.random() < 0.3:
            self.now_ms += int(self.rng.exponential(100_000))
        acts = list(self._acts())
        if acts:
            self.feed(acts[int(self.rng.integers(len(acts)))])
            return True
        return self._fire()

    def _fire(self) -> bool:
        """The next timer, whenever it is due; False: none is within a year."""
        due = self.state.next_timer()
        if due is None or due[0] > self.now_ms + YEAR_MS:
            return False
        self.now_ms = max(self.now_ms, due[0])
        self.feed(TimerFired(timer_id=due[1]))
        return True

    def _acts(self) -> Iterator[Event]:
        """What nodes may report next: a start, an end by itself, or the end of a stop."""
        for job in self.state.holding.values():
            for task_id, task in job.tasks.items():
                if task.status is TaskStatus.ASSIGNED and not self._waits(job):
                    yield TaskStarted(
                        node_id=task.place.node_id,
                        task_id=task_id,
                        token=job.token,
                        pid=7,
                        started_ms=self.now_ms,
                    )
                elif task.status in LIVE[1:]:
                    stopped = task.status is TaskStatus.STOPPING
                    yield TaskExited(
                        node_id=task.place.node_id,
                        task_id=task_id,
                        token=job.token,
                        cause="stopped" if stopped else "exited",
                        signal=15 if stopped else None,
                        exit_code=None if stopped else 0,
                        started_ms=self.now_ms,
                        exited_ms=self.now_ms,
                    )

    def _waits(self, job: JobState) -> bool:
        """Whether a job after which it starts still has tasks."""
        jobs = self.state.jobs
        return any(before in jobs and jobs[before].tasks for before in job.succession.after)

    def _disturb(self) -> None:
        """A user cancels or holds a waiting job, an operator takes a node out of use or gives one back, a
        node falls silent or loses a GPU."""
        kind, at = int(self.rng.integers(6)), float(self.rng.random())
        waiting = list(self.state.queue.values())
        nodes = sorted(self.state.nodes)
        if kind == 0 and waiting:
            self.feed(JobCancelRequested(job_id=waiting[int(at * len(waiting))]))
        elif kind == 1 and waiting:
            self.held.add(job_id := waiting[int(at * len(waiting))])
            self.feed(JobHoldRequested(job_id=job_id, by="ada"))
        elif kind == 2:
            self.cordoned.add(node_id := nodes[int(at * len(nodes))])
            self.feed(NodeCordoned(node_id=node_id, by="ada", reason="a driver", drain=at < 0.3))
        elif kind == 3 and self.cordoned:
            self.cordoned.remove(node_id := min(self.cordoned))
            self.feed(NodeUncordoned(node_id=node_id, by="ada", reason="done"))
        elif kind == 4:
            self.silent.add(node_id := nodes[int(at * len(nodes))])
            self.feed(NodeSuspected(node_id=node_id, reason="its connection broke"))
        elif kind == 5:
            node = self.state.nodes[nodes[int(at * len(nodes))]]
            if not node.spec.gpus:
                return
            self.silent.add(node.spec.node_id)
            gpu = node.spec.gpus[int(self.rng.integers(len(node.spec.gpus)))]
            self.feed(
                GpuFaulted(node_id=node.spec.node_id, gpu=gpu.index, uuid=gpu.uuid, fault="xid", code=79)
            )

    def _joins_again(self, node_id: str) -> None:
        """With all its tasks, and with sound GPUs."""
        node = self.state.nodes[node_id]
        tasks = [
            RunningTask(task_id=task_id, token=self.state.jobs[job_id].token)
            for task_id, job_id in node.tasks.items()
        ]
        self.feed(NodeJoined(node=node.spec, tasks=tuple(tasks)))

    def _undisturb(self) -> None:
        for node_id in sorted(self.silent):
            self._joins_again(node_id)
        for node_id in sorted(self.cordoned):
            self.feed(NodeUncordoned(node_id=node_id, by="ada", reason="done"))
        for job_id in sorted(self.held):
            self.feed(JobReleaseRequested(job_id=job_id, by="ada"))
        self.cordoned, self.held, self.silent = set(), set(), set()

    def _submit(self) -> None:
        """One job of any kind: gangs, with parameter servers, moldable, shared, without GPUs, urgent, with a
        deadline, saving or not."""
        rng, job_id = self.rng, f"j{self.submitted}"
        self.submitted += 1
        gpus, workers = int(rng.choice([0, 1, 1, 2, 4, 8])), int(rng.choice([1, 1, 1, 2, 3, 4]))
        moldable = gpus > 0 and bool(rng.random() < 0.15)
        servers = int(workers > 1 and not moldable and rng.random() < 0.15)
        spec = JobSpec(
            command=("train",),
            owner=f"u{int(rng.integers(3))}",
            workers=workers,
            parameter_servers=servers,
            min_workers=1 if moldable else None,
            global_batch_size=64 if moldable else None,
            priority=int(rng.integers(-5, 6)) if rng.random() < 0.5 else 0,
            checkpoint="sdk" if rng.random() < 0.5 else "none",
            prelaunch=bool(rng.random() < 0.2),
            preemptible=bool(rng.random() < 0.8),
            qos="urgent" if rng.random() < 0.05 else "prior" if rng.random() < 0.05 else None,
            deadline_ms=int(rng.integers(60_000, 10_000_000)) if rng.random() < 0.1 else None,
            gpu_models=("V100",) if gpus and rng.random() < 0.1 else (),
            iterations=10_000,
            resources=ResourceRequest(),
        )
        need = ResourceVector(
            gpus=gpus,
            cores=int(rng.integers(1, 7)),
            host_memory_mib=int(rng.integers(256, 30_000)),
            gpu_memory_mib=int(rng.integers(256, 12_000)) if gpus else 0,
            gpu_share_milli=int(rng.choice([250, 500])) if gpus == 1 and rng.random() < 0.15 else 1_000,
        )
        server = ResourceVector(cores=int(rng.integers(1, 7)), host_memory_mib=1_024)
        found = Estimate(
            worker=need,
            parameter_server=server if servers else ResourceVector(),
            confidence=1.0,
            tier="user",
            source="a test",
            run_ms=int(rng.integers(10_000, 10_000_000)) if rng.random() < 0.5 else None,
            options=self._options(workers) if moldable and gpus == 1 else (),
        )
        self.feed(JobSubmitted(job_id=job_id, spec=spec))
        if job_id in self.state.jobs:
            self.feed(JobEstimated(job_id=job_id, estimate=found))

    def _options(self, workers: int) -> tuple[ShapeOption, ...]:
        """Step times of a moldable job by its number of workers, on one node."""
        step_ms = float(self.rng.uniform(50, 500))
        return tuple(
            ShapeOption(
                workers=count,
                nodes=1,
                gpus_per_node=count,
                step_ms=step_ms / count**0.8,
                low_ms=0.9 * step_ms / count**0.8,
                high_ms=1.1 * step_ms / count**0.8,
            )
            for count in range(1, workers + 1)
        )


IMPATIENT = '{"patience_ms":0}'
"""Own settings of `coda` under which nodes are reserved at once for a job that does not fit."""


def settings_of(seed: int, profile: str, window: int) -> PlacerSettings:
    """Settings that an operator may give, each of them in some cells, with this backfill window."""
    rng = np.random.default_rng([seed, 2])

    def one(*choices: T) -> T:
        return choices[int(rng.integers(len(choices)))]

    stages: tuple[Stage, ...] = ("deadlines", "backfill", "bursts", "groups", "moves", "prelaunch", "reclaim")
    return PlacerSettings(
        profile=profile,
        seed=seed,
        backfill_window=window,
        max_overtakes=one(0, 3, 256, MAX_OVERTAKES),
        batch_window_ms=one(0, 0, 1_000, 60_000),
        lease_ms=one(600_000, 600_000, 10_000, 0),
        unschedulable_grace_ms=one(300_000, 0, MAX_MS),
        prelaunch_wait_ms=one(60_000, 0, 3_600_000),
        share_gpus=one("never", "fits", "learned"),
        freeze_fraction=one(0.5, 1.0),
        coda=(
            arrays := one((Coda(), ""), (Coda(), IMPATIENT), (Coda(cores_per_gpu=0.0, max_reclaims=0), ""))
        )[0],
        profile_settings=arrays[1] if profile == "coda" else "",
        without=tuple(stage for stage in stages if rng.random() < 0.3) if rng.random() < 0.5 else (),
    )
