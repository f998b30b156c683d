"""The engine: virtual time, a heap of what is to come, and the real cores in between.

One moment, in this order (ties inside a class: first scheduled, first served):
  0  work flows until now: jobs that are done exit, running jobs report
  1  jobs that arrive now are submitted and estimated
  2  nodes answer, at their latency
  3  the placer's timers that are due
and again from 2 until nothing is left at this moment. The engine keeps exact time as seconds in doubles; the
ledger's time is the same, rounded up to whole milliseconds, so a timer never fires before what it waits for.
The engine draws no chance at all: what is random is seeded inside the cores.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.cluster.moves import JobStatus
from penstock.cluster.nouns import Estimate, JobSpec, NodeSpec, ResourceRequest
from penstock.estimator.core.estimate import estimate
from penstock.events import doors, facts
from penstock.events.base import Event
from penstock.events.facts import Order, PlacerSettings
from penstock.ledger.check import check
from penstock.node_reporter.core.machine import Input
from penstock.placer.core.step import Step
from penstock.simulator.cell import Cell, Sink
from penstock.simulator.jobs import Shape, TraceJob, shape_of
from penstock.simulator.meter import Figures, Meter
from penstock.simulator.nodes import Latency, SimulatedNodes
from penstock.simulator.truth import Work

COMMAND = ("simulated",)
HOST_MEMORY_PER_GPU_MIB = 1_024
GPU_MEMORY_MIB = 1_024
MAX_JOBS_PER_REPORT = 256  # as WorkProgressed holds
MAX_STEPS_PER_MOMENT = 1_000_000  # far above any real one: a policy that undoes its own plan for ever


class Unsound(Exception):
    """An invariant broke; the message holds every violation and the seq."""


class Options(NamedTuple):
    """How to simulate, beside cluster, settings and truth."""

    latency: Latency = Latency()
    durations_known: bool = True
    """Whether estimates carry the trace's run time."""
    single_gpu_workers: bool = False
    """A worker per GPU, free to spread over nodes; else as few workers as nodes can hold."""
    tick_s: float = 0.0
    """With > 0 the placer hears of everything only at multiples of this: what a heartbeat would cost."""
    check_every_step: bool = False
    """`check(state)` after each record; slow."""


class _Due(NamedTuple):
    """What happens by itself at a later time."""

    at_s: float
    order: int
    act: Callable[[], None]


class Simulation:
    """One run. `jobs` in order of arrival; equal times keep the order given."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        settings: PlacerSettings,
        work: Work,
        jobs: Iterable[TraceJob],
        options: Options = Options(),  # noqa: B008 - immutable
        sink: Sink | None = None,
    ) -> None:
        self.cell = Cell(settings, sink)
        self.meter = Meter(sum(len(node.gpus) for node in nodes))
        self.now_s = 0.0
        self._work = work
        self._options = options
        self._nodes = SimulatedNodes(nodes, options.latency, self._later)
        self._gpus_per_node = max(len(node.gpus) for node in nodes)
        self._arrivals = sorted(jobs, key=lambda job: job.submit_s)
        self._arrived = 0
        self._due: list[_Due] = []
        self._order = count()
        self._needs: dict[int, tuple[ResourceRequest, Estimate]] = {}
        self._task_gpus: dict[str, int] = {}
        self._alone_s: dict[str, float] = {}
        self._steps = 0
        for node in nodes:
            self.cell.join(node)

    @property
    def jobs(self) -> int:
        """In the whole trace."""
        return len(self._arrivals)

    def figures(self, wall_s: float, cpu_s: float) -> Figures:
        """What came of it so far; real time and processor time as the caller measured them."""
        return self.meter.figures(self._alone_s, self.cell.head.id, self.cell.head.seq, wall_s, cpu_s)

    def step(self) -> bool:
        """Goes to the next moment and works it off; False when there is none."""
        now_s = self._next_s()
        if now_s is None:
            return False
        self.meter.at(now_s)
        self.now_s = now_s
        self._steps = 0
        arriving = self._arrives_now()
        work_s = self._work.next_s()
        if arriving or (work_s is not None and work_s <= now_s):
            self._flow()
        for job in arriving:
            self._submit(job)
        self._settle()
        self.meter.waiting = len(self.cell.state.queue)
        return True

    # ------------------------------------------------------------------------------------------ time

    def _now_ms(self) -> int:
        return ceil(self.now_s * 1_000)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._order), act))

    def _later(self, after_s: float, node_id: str, given: Input) -> None:
        self._at(self.now_s + after_s, lambda: self._answer(node_id, given))

    def _answer(self, node_id: str, given: Input) -> None:
        for event in self._nodes.feed(node_id, given, self._now_ms()):
            self._deliver(event)
        self._interrupted()

    def _next_s(self) -> float | None:
        """The earliest of: an arrival, work, a node's answer, a timer."""
        times: list[float] = []
        if self._arrived < len(self._arrivals):
            times.append(self._arrivals[self._arrived].submit_s)
        work_s = self._work.next_s()
        if work_s is not None:
            times.append(work_s)
        if self._due:
            times.append(self._due[0].at_s)
        due = self.cell.state.next_timer()
        if due is not None:
            times.append(due[0] / 1_000)
        return max(self.now_s, self._tick(min(times))) if times else None

    def _tick(self, at_s: float) -> float:
        """The next tick, if there are ticks."""
        tick_s = self._options.tick_s
        return ceil(at_s / tick_s) * tick_s if tick_s else at_s

    def _arrives_now(self) -> Sequence[TraceJob]:
        first = self._arrived
        while self._arrived < len(self._arrivals) and self._arrivals[self._arrived].submit_s <= self.now_s:
            self._arrived += 1
        return self._arrivals[first : self._arrived]

    def _settle(self) -> None:
        """Answers and timers of this moment, until there are none."""
        while True:
            if self._due and self._due[0].at_s <= self.now_s:
                heapq.heappop(self._due).act()
                continue
            due = self.cell.state.next_timer()
            if due is None or due[0] > self._now_ms():
                return
            self._after(self.cell.fire(due[1], self._now_ms()))

    # ----------------------------------------------------------------------------------------- inputs

    def _flow(self) -> None:
        instant = self._work.advance(self.now_s)
        for job_id, at_s in instant.ended:
            self.meter.finished_work(job_id, at_s)
            job = self.cell.state.jobs[job_id]
            for task_id, task in list(job.tasks.items()):
                node_id = task.place.node_id
                for event in self._nodes.finish(node_id, task_id, job.token, self._now_ms()):
                    self._deliver(event)
        self._report(instant.told)

    def _report(self, told: Sequence[doors.JobProgress]) -> None:
        for first in range(0, len(told), MAX_JOBS_PER_REPORT):
            jobs = tuple(told[first : first + MAX_JOBS_PER_REPORT])
            self._deliver(doors.WorkProgressed(node_id=self.cell.state.node_at[0], jobs=jobs))

    def _submit(self, job: TraceJob) -> None:
        self.meter.arrived(job)
        self._alone_s[job.job_id] = self._work.alone_s(job)
        told = self._work.admit(job, self.now_s)
        single = self._options.single_gpu_workers
        shape = Shape(job.gpus, 1) if single else shape_of(job.gpus, self._gpus_per_node)
        request, need = self._need(shape)
        spec = JobSpec(
            name=job.job_id,
            owner=job.owner or "unknown",
            command=COMMAND,
            workers=shape.workers,
            resources=request,
            model=job.model or None,
            batch_size=job.batch_size,
        )
        self._deliver(doors.JobSubmitted(job_id=job.job_id, spec=spec))
        if self._options.durations_known:
            need = need.model_copy(update={"run_ms": ceil(self._alone_s[job.job_id] * 1_000)})
        self._deliver(doors.JobEstimated(job_id=job.job_id, estimate=need))
        if told is not None:
            self._report((told,))

    def _need(self, shape: Shape) -> tuple[ResourceRequest, Estimate]:
        """The request of a worker, and the estimator core's answer to it."""
        gpus = shape.gpus_per_worker
        found = self._needs.get(gpus)
        if found is None:
            request = ResourceRequest(
                gpus=gpus,
                cores=max(1, gpus),
                host_memory_mib=HOST_MEMORY_PER_GPU_MIB * max(1, gpus),
                gpu_memory_mib=GPU_MEMORY_MIB,
            )
            found = request, estimate(JobSpec(command=COMMAND, resources=request), ())
            self._needs[gpus] = found
        return found

    # ---------------------------------------------------------------------------------------- answers

    def _deliver(self, event: Event) -> None:
        """Brings an event to the placer: here at once, and once."""
        self._feed(event)

    def _send(self, order: Order) -> None:
        """Brings an order to its node: here at once, and once."""
        self._obey(order)

    def _obey(self, order: Order) -> None:
        for event in self._nodes.obey(order, self._now_ms()):
            self._deliver(event)
        self._interrupted()

    def _feed(self, event: Event) -> None:
        self._after(self.cell.feed(event, self._now_ms()))

    def _after(self, step: Step) -> None:
        """Books what a record says, and lets the nodes obey it."""
        self._steps += 1
        if self._steps > MAX_STEPS_PER_MOMENT:
            raise Unsound(
                f"{MAX_STEPS_PER_MOMENT} records at {self.now_s} s, and no end; seq {self.cell.head.seq}"
            )
        if self._options.check_every_step:
            problems = check(self.cell.state)
            if problems:
                raise Unsound(f"seq {self.cell.head.seq}: {'; '.join(problems)}")
        if step.outcome == "committed":
            for fact in step.facts:
                book = BOOKS.get(fact.TYPE)
                if book is not None:
                    book(self, fact)
        self._dispatch(step)

    def _dispatch(self, step: Step) -> None:
        for order in self.cell.orders(step):
            self._send(order)

    def _interrupted(self) -> None:
        """A gang makes no progress from its first SIGTERM on."""
        for task_id in self._nodes.terminated:
            job_id = task_id.rsplit(".", 2)[0]
            self._work.stopped(job_id, self.now_s)
            self.meter.stopped(job_id, self.now_s)
        self._nodes.terminated.clear()

    def _placed(self, fact: facts.PlacementDecided) -> None:
        for place in fact.tasks:
            self._task_gpus[place.task_id] = len(place.gpus)
            self.meter.held += len(place.gpus)

    def _started(self, fact: doors.TaskStarted) -> None:
        job_id = fact.task_id.rsplit(".", 2)[0]
        job = self.cell.state.jobs.get(job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return
        placement: dict[str, int] = {}
        for task in job.tasks.values():
            node_id = task.place.node_id
            placement[node_id] = placement.get(node_id, 0) + len(task.place.gpus)
        self._work.started(job_id, placement, self.now_s)
        self.meter.started(job_id, self.now_s)

    def _freed(self, fact: doors.TaskExited | facts.TaskLost | doors.OrderRefused) -> None:
        self.meter.held -= self._task_gpus.pop(fact.task_id)

    def _preempted(self, fact: facts.JobPreempted) -> None:
        self.meter.preemptions += 1

    def _ended(self, fact: facts.JobEnded) -> None:
        self.meter.ended(fact.job_id)


BOOKS: Mapping[str, Callable[[Simulation, Any], None]] = MappingProxyType(
    {
        facts.PlacementDecided.TYPE: Simulation._placed,
        doors.TaskStarted.TYPE: Simulation._started,
        doors.TaskExited.TYPE: Simulation._freed,
        facts.TaskLost.TYPE: Simulation._freed,
        doors.OrderRefused.TYPE: Simulation._freed,
        facts.JobPreempted.TYPE: Simulation._preempted,
        facts.JobEnded.TYPE: Simulation._ended,
    }
)
