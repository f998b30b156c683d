"""What really happens to jobs while the scheduler decides: how far they get, and when they end.

A *truth model* says how fast a job runs; it is measured data, never a model that Penstock decides with. The
*work* of a run turns speeds into ends. Most truths share `SteadyWork`: work flows at a constant speed between
changes. A truth whose source counts otherwise brings its own.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.events.doors import JobProgress
from penstock.simulator.jobs import TraceJob

Placement = Mapping[str, int]
"""Node id → GPUs on it, of one job; nodes in order of rank."""


class Truth(Protocol):
    """How fast jobs run."""

    @property
    def name(self) -> str: ...

    @property
    def neighbours_matter(self) -> bool:
        """Whether a job's speed changes when others start or stop on its nodes."""
        ...

    def work_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on what it asked for, > 0."""
        ...

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[TraceJob]) -> float:
        """Seconds of work done per second, > 0. `neighbours`: jobs that run on one of its nodes, by id."""
        ...

    def start_up_s(self, job: TraceJob) -> float:
        """Seconds after each start in which nothing is done, ≥ 0."""
        ...


class End(NamedTuple):
    """A job's work is done since `at_s`."""

    job_id: str
    at_s: float


class Instant(NamedTuple):
    """What the jobs did up to a moment."""

    ended: Sequence[End]
    told: Sequence[JobProgress]
    """What jobs report of themselves."""


class Work(Protocol):
    """The running jobs and what is left of them. Times never go back."""

    def alone_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on what it asked for, without start-up."""
        ...

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        """The job exists; what it says of itself, if anything."""
        ...

    def started(self, job_id: str, placement: Placement, now_s: float) -> None: ...

    def stopped(self, job_id: str, now_s: float) -> None: ...

    def next_s(self) -> float | None:
        """The next moment at which something happens by itself; None while nothing runs."""
        ...

    def advance(self, now_s: float) -> Instant:
        """Lets the work flow until `now_s`: called at `next_s` and at every arrival."""
        ...


class _Run:
    __slots__ = ("end_s", "job", "left_s", "placement", "resumes_s", "since_s", "speed", "version")

    def __init__(self, job: TraceJob, left_s: float) -> None:
        self.job = job
        self.left_s = left_s
        self.placement: Placement = {}
        self.since_s = self.resumes_s = self.end_s = 0.0
        self.speed = 0.0
        self.version = 0


class SteadyWork:
    """Work flows at the truth's speed, from the end of the start-up on; a stop keeps what was done."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._runs: dict[str, _Run] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        self._running: dict[str, None] = {}
        self._ends: list[tuple[float, str, int]] = []

    def alone_s(self, job: TraceJob) -> float:
        return self._truth.work_s(job)

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        self._runs[job.job_id] = _Run(job, self._truth.work_s(job))
        return None

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._runs[job_id]
        run.placement = placement
        run.since_s = now_s
        run.resumes_s = now_s + self._truth.start_up_s(run.job)
        self._running[job_id] = None
        for node_id in placement:
            self._on_node.setdefault(node_id, {})[job_id] = None
        self._set_speed(run)
        self._others_change(run, now_s)

    def stopped(self, job_id: str, now_s: float) -> None:
        run = self._runs[job_id]
        if job_id in self._running:
            self._settle(run, now_s)
            self._leave(run, now_s)

    def next_s(self) -> float | None:
        while self._ends:
            end_s, job_id, version = self._ends[0]
            run = self._runs.get(job_id)
            if run is not None and job_id in self._running and run.version == version:
                return end_s
            heapq.heappop(self._ends)
        return None

    def advance(self, now_s: float) -> Instant:
        ended: list[End] = []
        while (due := self.next_s()) is not None and due <= now_s:
            job_id = heapq.heappop(self._ends)[1]
            ended.append(End(job_id, due))
            self._leave(self._runs[job_id], due)
            del self._runs[job_id]
        return Instant(ended, ())

    def _settle(self, run: _Run, now_s: float) -> None:
        """Books the work done since the last change."""
        run.left_s = max(0.0, run.left_s - max(0.0, now_s - max(run.since_s, run.resumes_s)) * run.speed)
        run.since_s = now_s

    def _set_speed(self, run: _Run) -> None:
        neighbours: list[TraceJob] = []
        if self._truth.neighbours_matter:
            ids = {other for node_id in run.placement for other in self._on_node[node_id]} - {run.job.job_id}
            neighbours = [self._runs[other].job for other in sorted(ids)]
        run.speed = self._truth.speed(run.job, run.placement, neighbours)
        run.version += 1
        run.end_s = max(run.since_s, run.resumes_s) + run.left_s / run.speed
        heapq.heappush(self._ends, (run.end_s, run.job.job_id, run.version))

    def _leave(self, run: _Run, now_s: float) -> None:
        del self._running[run.job.job_id]
        run.version += 1
        for node_id in run.placement:
            del self._on_node[node_id][run.job.job_id]
        self._others_change(run, now_s)

    def _others_change(self, run: _Run, now_s: float) -> None:
        if not self._truth.neighbours_matter:
            return
        ids = {other for node_id in run.placement for other in self._on_node[node_id]} - {run.job.job_id}
        for other in sorted(ids):
            self._settle(self._runs[other], now_s)
            self._set_speed(self._runs[other])


class Constant:
    """Truth `constant`: a job runs as long as its trace says, wherever it is placed."""

    @property
    def name(self) -> str:
        return "constant"

    @property
    def neighbours_matter(self) -> bool:
        return False

    def work_s(self, job: TraceJob) -> float:
        return job.duration_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[TraceJob]) -> float:
        return 1.0

    def start_up_s(self, job: TraceJob) -> float:
        return 0.0
