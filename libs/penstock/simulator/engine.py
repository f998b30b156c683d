"""Discrete-event simulation: virtual time, an event heap, and the services' own cores between events.

Order of events at one moment (ties inside a class: first scheduled, first served):
  0  work advances until now: completed jobs exit, running jobs report
  1  jobs that arrive now are submitted and estimated
  2  nodes answer, at their latency
  3  the placer's timers that are due
  4  running jobs report their steps, and services publish their plans; last of all the batcher
and again from 2 until nothing is left at this moment. The engine keeps exact time as seconds in doubles; the
ledger's time is the same, rounded up to whole milliseconds, so a timer never fires before the event it waits
for. The engine itself uses no random numbers: they are seeded inside the cores.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import ceil
from signal import SIGKILL
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.ledger.check.check import check
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.arrays import CoresReclaimed
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import WHOLE_GPU, Estimate
from penstock.model.schema.event import Event
from penstock.simulator.cell import Cell
from penstock.simulator.held_gpus import HeldGpus
from penstock.simulator.job_models.model import Work, allocations, capped
from penstock.simulator.meter import Figures, Meter
from penstock.simulator.nodes import Latency, SimulatedNodes
from penstock.simulator.services.learning import SimulatedEstimator
from penstock.simulator.services.port import Attached, Services, to_both
from penstock.simulator.services.simulated_services import simulated_services
from penstock.simulator.submissions import Submissions, saves_when_stopped
from penstock.simulator.task_reports.gang_reports import checkpoint_reports, phase_reports
from penstock.simulator.task_reports.stage_profiles import StageProfiles
from penstock.simulator.task_reports.step_reports import StepReports
from penstock.simulator.task_reports.telemetry import Telemetry
from penstock.simulator.traces.jobs import TraceJob
from penstock.simulator.traces.resources import COMMAND
from penstock_services.batcher.core.batcher import plans
from penstock_services.migrator.core.migrator import migrates
from penstock_services.node_reporter.core.inputs import Gone, Input, OrderRead, Outcome
from penstock_services.placer.core.recorder import Sink
from penstock_services.placer.core.step import Step

MAX_JOBS_PER_REPORT = 256  # bound of WorkProgressed
DEFAULT_GRACE_MS = JobSpec(command=COMMAND).grace_ms
WINDOW_MS = 5_000  # in which jobs wait for the batcher's plan, if the settings name no window
MAX_STEPS_PER_MOMENT = 1_000_000  # far above any real one; ends a policy that undoes its plan for ever


class Unsound(Exception):
    """An invariant broke; the message holds every violation and the seq."""


Durations = Literal["known", "learned", "unknown"]


class Options(NamedTuple):
    """Options of a simulation beside cluster, settings and job model."""

    latency: Latency = Latency()
    durations: Durations = "known"
    """Source of the run times in estimates: the trace, ended runs, or none."""
    single_gpu_workers: bool = False
    """A worker per GPU, free to spread over nodes; else as few workers as nodes can hold."""
    tick_s: float = 0.0
    """If > 0 the placer receives events only at multiples of this time, to measure the cost of a
    heartbeat."""
    check_every_step: bool = False
    """`check(state)` after each record; slow."""
    grace_ms: int = DEFAULT_GRACE_MS
    """Between SIGTERM and SIGKILL, of every job."""
    slices_per_core: int = 1
    """Nodes' units per core: 8 if they count in eighths, so that jobs may have parts of cores."""
    estimator_s: float | None = 0.0
    """Time that the estimator takes for an answer, if run times are learned; None: the real computing
    time."""
    services: Sequence[Attached] = ()
    """Further services of the cell."""
    predicts: Callable[[TraceJob, Estimate], Estimate] = lambda job, estimate: estimate
    """Adds the estimator's predictions to an estimate with the trace's requests."""
    saves: Callable[[TraceJob], bool] | None = None
    """Jobs that save when they are stopped and resume there; None: those whose saves the profile's services
    may need."""
    names_cores: Callable[[TraceJob], bool] = lambda job: True
    """Jobs whose users name their cores; other jobs' cores are an estimate, and may be searched for."""
    planning_s: float | None = 0.0
    """Time that the batcher takes for a plan, under profiles for which it plans; None: the real computing
    time."""
    profile_noise: float = 0.0
    """Largest relative error of stage times in estimates, 0 – 1; it does not affect the jobs' speeds. Source:
    Muri §6.4."""
    prelaunch: bool = False
    """Every job's script waits for its GPUs where it begins to train: it may launch while the jobs that hold
    them end."""


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
        self.now_s = 0.0
        attached = list(options.services)
        self._unestimated: dict[str, Estimate] = {}
        """Resources of submitted jobs that the estimator has not answered yet."""
        self._learns = options.durations == "learned"
        if self._learns:
            estimator = SimulatedEstimator(self._unestimated)
            attached.insert(0, Attached(estimator, planning_s=options.estimator_s))
        self._services = Services(attached, lambda: self.now_s) if attached else None
        self._step_reports = StepReports()
        self._plans = plans(settings)
        self._reports_steps = self._learns or migrates(settings)
        self._simulated = simulated_services(settings, options.planning_s)
        self._telemetry = Telemetry(self._simulated, self._services)
        if self._plans and not settings.batch_window_ms:
            settings = msgspec.structs.replace(settings, batch_window_ms=WINDOW_MS)
        self._stage_profiles = StageProfiles(settings.seed, options.profile_noise)
        self.cell = Cell(settings, sink if self._services is None else to_both(self._services.deliver, sink))
        self.meter = Meter(sum(len(node.gpus) for node in nodes))
        self._now_ms = 0
        """`now_s` in the ledger's time."""
        self._work = work
        self._options = options
        self._nodes = SimulatedNodes(nodes, options.latency, self._later, self)
        self._arrivals = sorted(jobs, key=lambda job: job.submit_s)
        self._arrived = 0
        self._due: list[tuple[float, int, str, Input]] = []
        """(at s, order of scheduling, node id, input of the node)."""
        self._order = count()
        self._submissions = Submissions(
            gpus_per_node=max(len(node.gpus) for node in nodes),
            single_gpu_workers=options.single_gpu_workers,
            slices_per_core=options.slices_per_core,
            grace_ms=options.grace_ms,
            learns=self._reports_steps,
            saves=options.saves or saves_when_stopped(settings),
            names_cores=options.names_cores,
            prelaunch=options.prelaunch,
        )
        self._held_gpus = HeldGpus()
        self._launching: set[str] = set()
        """Launching tasks of gangs whose other tasks do not all launch yet."""
        self._alone_s: dict[str, float] = {}
        self._steps = 0
        for node in nodes:
            self.cell.join(node)

    @property
    def durations(self) -> Durations:
        return self._options.durations

    @property
    def jobs(self) -> int:
        """Number of jobs in the whole trace."""
        return len(self._arrivals)

    def figures(self, wall_s: float, cpu_s: float) -> Figures:
        """The figures so far; real time and processor time as the caller measured them."""
        head = self.cell.head
        return self.meter.figures(self._alone_s, head.id, head.seq, wall_s, cpu_s, self._work.charges)

    def step(self) -> bool:
        """Advances to the next moment and processes its events; False when there is none."""
        now_s = self._next_s()
        if now_s is None:
            return False
        self.meter.at(now_s)
        self.now_s = now_s
        self._now_ms = ceil(now_s * 1_000)
        self._steps = 0
        arriving = self._arrives_now()
        work_s = self._work.next_s()
        reports: list[external_events.JobProgress] = []
        if arriving or (work_s is not None and work_s <= now_s):
            reports += self._flow()
        reports += [first for job in arriving if (first := self._submit(job)) is not None]
        self._report(reports)
        self._settle()
        self.meter.waiting = len(self.cell.state.queue)
        return True

    # ------------------------------------------------------------------------------------------ time

    def _later(self, after_s: float, node_id: str, given: Input) -> None:
        heapq.heappush(self._due, (self.now_s + after_s, next(self._order), node_id, given))

    def _answer(self, node_id: str, given: Input) -> None:
        """Gives a node an input, which it answers at once."""
        for event in self._nodes.feed(node_id, given, self._now_ms):
            self._deliver(event)
        if self._nodes.terminated:
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
            times.append(self._due[0][0])
        due = self.cell.state.next_timer()
        if due is not None:
            times.append(due[0] / 1_000)
        service_s = None if self._services is None else self._services.next_s()
        own = service_s, self._step_reports.next_s(), self._telemetry.next_s()
        times += [at_s for at_s in own if at_s is not None]
        times += [at_s for one in self._simulated if (at_s := one.next_s(self.cell.state)) is not None]
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
        """Processes answers, timers, reports and services of this moment until there are none."""
        while True:
            if self._due and self._due[0][0] <= self.now_s:
                _, _, node_id, given = heapq.heappop(self._due)
                self._answer(node_id, given)
                continue
            due = self.cell.state.next_timer()
            if due is not None and due[0] <= self._now_ms:
                self._after(self.cell.fire(due[1], self._now_ms))
            elif self._report_steps() or (self._services is not None and self._serve(self._services)):
                continue
            elif paces := self._work.paces():
                self._telemetry.paces(paces, self.cell.state, self.now_s, self._now_ms)
            elif self._telemetry.due(self.cell.state, self.now_s, self._now_ms):
                continue
            elif not self._propose():
                return

    def _propose(self) -> bool:
        """Delivers the next proposal of a simulated service at this moment; whether there was one."""
        for service in self._simulated:
            if (proposal := service.due(self.cell.state, self.now_s, self._now_ms)) is not None:
                self._deliver(proposal)
                return True
        return False

    def _serve(self, services: Services) -> bool:
        """Delivers the next events of a service at this moment; whether there were any."""
        events = services.due()
        for event in events:
            self._deliver(event)
        return bool(events)

    # ----------------------------------------------------------------------------------------- inputs

    def _flow(self) -> Sequence[external_events.JobProgress]:
        """Advances the work until now; returns the reports of running jobs."""
        instant = self._work.advance(self.now_s)
        for change in instant.phases:
            for report in phase_reports(self.cell.state.jobs[change.job_id], change):
                self._deliver(report)
        for loss in instant.losses:
            self._telemetry.loss(loss, self.cell.state, self._now_ms)
        for checkpoint in instant.checkpoints:
            for saved in checkpoint_reports(self.cell.state.jobs[checkpoint.job_id], checkpoint):
                self._deliver(saved)
        for job_id, at_s in instant.ended:
            self.meter.finished_work(job_id, at_s)
            job = self.cell.state.jobs[job_id]
            if self._reports_steps:
                self._report_step(job, 1.0)
                self._step_reports.over(job_id)
            for task_id, task in list(job.tasks.items()):
                self._answer(task.place.node_id, Gone(task_id, job.token, Outcome(self._now_ms, exit_code=0)))
        return instant.progress

    def _report_steps(self) -> bool:
        """Reports the steps of the next job that is due; whether there was one."""
        due = self._step_reports.due(self.now_s)
        if due is None:
            return False
        job_id, token = due
        job, share = self.cell.state.jobs.get(job_id), self._work.share(job_id, self.now_s)
        if job is None or job.token != token or job.status is not JobStatus.RUNNING or share is None:
            self._step_reports.over(job_id)
        else:
            self._report_step(job, share)
        return True

    def _report_step(self, job: JobState, share: float) -> None:
        """Reports, as the job's chief, the share of its work that is done."""
        task_id, task = next(iter(job.tasks.items()))
        trace_job = self.meter.lives[job.job_id].job
        found = self._step_reports.report(trace_job, share, task.place.node_id, task_id, self.now_s)
        if found is not None:
            self._deliver(found)

    def _report(self, reports: Sequence[external_events.JobProgress]) -> None:
        """Delivers all reports of jobs at this moment, also of those that have just arrived; remaining times
        only if known."""
        if self._options.durations != "known":
            reports = [msgspec.structs.replace(report, remaining_s=None) for report in reports]
        reporter = next(iter(self.cell.state.nodes))
        for first in range(0, len(reports), MAX_JOBS_PER_REPORT):
            jobs = tuple(reports[first : first + MAX_JOBS_PER_REPORT])
            self._deliver(external_events.WorkProgressed(node_id=reporter, jobs=jobs))

    def _submit(self, job: TraceJob) -> external_events.JobProgress | None:
        """Submits a job; returns the first progress it reports, if any."""
        self.meter.arrived(job)
        self._alone_s[job.job_id] = self._work.alone_s(job)
        progress = self._work.admit(job, self.now_s)
        spec, need = self._submissions.of(job)
        need = self._options.predicts(job, need)
        if self._plans and job.stages is not None:
            need = msgspec.structs.replace(need, stages=self._stage_profiles.of(job))
        if self._learns:
            self._unestimated[job.job_id] = need
        self._deliver(external_events.JobSubmitted(job_id=job.job_id, spec=spec))
        if not self._learns:
            self._deliver(JobEstimated(job_id=job.job_id, estimate=self._timed(job, need)))
        while self._services is not None and self._serve(self._services):
            pass  # an estimator without planning time answers before the next job comes
        return progress

    def _timed(self, job: TraceJob, need: Estimate) -> Estimate:
        """The estimate with the run time that the policy may use."""
        alone_s = self._alone_s[job.job_id]
        if self._options.durations == "unknown" or alone_s <= 0:
            return need
        if self._options.prelaunch:
            launch_s = self._work.start_up_s(job)
            alone_s += launch_s + self._work.save_s(job)
            need = msgspec.structs.replace(need, launch_ms=ceil(launch_s * 1_000))
        return msgspec.structs.replace(need, run_ms=ceil(alone_s * 1_000))

    # ---------------------------------------------------------------------------------------- answers

    def _deliver(self, event: Event) -> None:
        """Delivers an event to the placer, at once and exactly once."""
        self._after(self.cell.record(event, self._now_ms))

    def _after(self, step: Step) -> None:
        """Applies a record to the figures, and lets the nodes execute its orders."""
        self._steps += 1
        if self._steps > MAX_STEPS_PER_MOMENT:
            raise Unsound(
                f"{MAX_STEPS_PER_MOMENT} records at {self.now_s} s, and no end; seq {self.cell.head.seq}"
            )
        if self._options.check_every_step and (problems := check(self.cell.state)):
            raise Unsound(f"seq {self.cell.head.seq}: {'; '.join(problems)}")
        state = self.cell.state
        for service in self._simulated:
            service.see(state, step)
        if step.outcome == "committed":
            for fact in step.facts:
                book = BOOKS.get(type(fact))
                if book is not None:
                    book(self, fact)
        if len(step.facts) > 1:
            for order in self.cell.orders(step):
                self._answer(order.node_id, OrderRead(order, self._now_ms))

    def saving_s(self, task_id: str) -> float:
        """Called by the nodes; see `Programs`."""
        return self._work.saving_s(_job_of(task_id), self.now_s)

    def checkpoint(self, task_id: str) -> None:
        """Called by the nodes; see `Programs`."""
        self._work.checkpoint(_job_of(task_id), self.now_s)

    def launching(self, task_id: str) -> None:
        """Called by the nodes; see `Programs`. A gang launches once all of its tasks do."""
        self._launching.add(task_id)
        self._launches(self.cell.state.jobs.get(_job_of(task_id)))

    def _launches(self, job: JobState | None) -> None:
        if job is None or job.status is not JobStatus.LAUNCHING:
            return
        waiting = [task_id for task_id, task in job.tasks.items() if task.started_ms is None]
        if waiting and self._launching.issuperset(waiting):
            self._launching.difference_update(job.tasks)
            self._work.launching(
                job.job_id, allocations(task.place for task in job.tasks.values()), self.now_s
            )

    def changed(self, task_id: str) -> None:
        """Called by the nodes; see `Programs`. It is not called for cores and caps with which a task
        starts."""
        job = self.cell.state.jobs.get(_job_of(task_id))
        if job is None or job.status is not JobStatus.RUNNING:
            return
        tasks = list(job.tasks.values())
        placement = allocations(task.used_place for task in tasks)
        caps = [(task.place.node_id, task.memory_bandwidth_percent) for task in tasks]
        nodes = self.cell.state.nodes
        by_time = {node_id for node_id in placement if nodes[node_id].spec.bandwidth_cap == "cpu_quota"}
        self._work.changed(job.job_id, capped(placement, caps, by_time), self.now_s)

    def _interrupted(self) -> None:
        """Stops the progress of each gang from its first SIGTERM on."""
        for task_id in self._nodes.terminated:
            job_id = _job_of(task_id)
            self._work.stopped(job_id, self.now_s)
            self.meter.stopped(job_id, self.now_s)
        self._nodes.terminated.clear()

    def _placed(self, fact: ledger_events.PlacementDecided) -> None:
        self._held_gpus.placed(self.cell.state, fact)
        self.meter.held = self._held_gpus.held / WHOLE_GPU

    def _started(self, fact: external_events.TaskStarted) -> None:
        job_id = _job_of(fact.task_id)
        job = self.cell.state.jobs.get(job_id)
        self._launching.discard(fact.task_id)
        if job is None or job.status is not JobStatus.RUNNING:
            self._launches(job)
            return
        self._work.started(job_id, allocations(task.place for task in job.tasks.values()), self.now_s)
        if any(task.memory_bandwidth_percent is not None for task in job.tasks.values()):
            self.changed(fact.task_id)
        self.meter.started(job_id, self.now_s)
        if self._reports_steps:
            self._step_reports.started(self.meter.lives[job_id].job, job.token, self.now_s)

    def _exited(self, fact: external_events.TaskExited) -> None:
        self._freed(fact)
        self._launching.discard(fact.task_id)
        self._telemetry.over(fact.task_id)
        if fact.cause == "stopped":
            self._work.gone(_job_of(fact.task_id), self.now_s, killed=fact.signal == SIGKILL)

    def _freed(
        self, fact: external_events.TaskExited | ledger_events.TaskLost | external_events.OrderRefused
    ) -> None:
        self._held_gpus.ends(fact.task_id)
        self.meter.held = self._held_gpus.held / WHOLE_GPU

    def _preempted(self, fact: Event) -> None:
        self.meter.preemptions += 1

    def _ended(self, fact: ledger_events.JobEnded) -> None:
        self.meter.ended(fact.job_id)


def _job_of(task_id: str) -> str:
    return task_id.rsplit(".", 2)[0]


BOOKS: Mapping[type[Event], Callable[[Simulation, Any], None]] = MappingProxyType(
    {
        ledger_events.PlacementDecided: Simulation._placed,
        external_events.TaskStarted: Simulation._started,
        external_events.TaskExited: Simulation._exited,
        ledger_events.TaskLost: Simulation._freed,
        external_events.OrderRefused: Simulation._freed,
        ledger_events.JobPreempted: Simulation._preempted,
        CoresReclaimed: Simulation._preempted,
        ledger_events.JobEnded: Simulation._ended,
    }
)
