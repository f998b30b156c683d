"""Interface of job models: how far simulated jobs get, and when they end.

A *job model* says how fast a job runs; it is measured data, never a model that Penstock decides with. The
*work* of a run turns speeds into ends. Most job models share `SteadyWork` (`steady.py`): work flows at a constant
speed between changes. A job model whose source counts otherwise brings its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.model.external_events import JobProgress
from penstock.model.types import TaskPlacement
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob

Phase = Literal["ready", "train", "save"]


class Allocation(NamedTuple):
    """What a job holds on one node, all of its tasks there together."""

    gpus: tuple[int, ...] = ()
    """Which ones."""
    cores: int = 0
    share_milli: int = WHOLE_GPU_MILLI
    """Thousandths of its GPU; less than a whole one only with one GPU."""
    workers: int = 1
    parameter_servers: int = 0
    host_memory_mib: int = 0
    bandwidth_percent: int | None = None
    """Cap of what its tasks there may take of the node's memory bandwidth, all together; None: no cap."""


NOTHING = Allocation(workers=0)
Placement = Mapping[str, Allocation]
"""Node id → what one job holds there; nodes in order of rank."""


def allocations(tasks: Iterable[TaskPlacement]) -> Placement:
    """What the tasks of a gang hold, node by node; the tasks in order of rank."""
    found: dict[str, Allocation] = {}
    for place in tasks:
        before = found.get(place.node_id, NOTHING)
        found[place.node_id] = Allocation(
            before.gpus + place.gpus,
            before.cores + len(place.cores),
            min(before.share_milli, place.gpu_share_milli),
            before.workers + (place.role == "worker"),
            before.parameter_servers + (place.role == "ps"),
            before.host_memory_mib + place.host_memory_mib,
        )
    return found


def capped(placement: Placement, caps: Iterable[tuple[str, int | None]]) -> Placement:
    """With caps of memory bandwidth, ⟨node, percent⟩ for each task. A job has none on a node where one of its tasks has none."""
    found: dict[str, list[int | None]] = {}
    for node_id, percent in caps:
        found.setdefault(node_id, []).append(percent)
    sums = {
        node_id: None if None in of_tasks else min(100, sum(percent or 0 for percent in of_tasks))
        for node_id, of_tasks in found.items()
    }
    return {
        node_id: held._replace(bandwidth_percent=sums.get(node_id)) for node_id, held in placement.items()
    }


class Neighbour(NamedTuple):
    """Another job that computes on one of a job's nodes."""

    job: TraceJob
    placement: Placement


class NotMeasured(LookupError):
    """The job model's table has no entry for this; the message names what it lacks."""


class JobModel:
    """How fast jobs run. By default nothing but the job and its own placement matters."""

    name: str
    neighbours_matter = False
    """Whether a job's speed changes when others start or stop to compute on its nodes."""
    knows_shapes = False
    """Whether it has measurements of a job on other numbers of GPUs than it asked for: only then it may be moldable."""

    def work_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on what it asked for, > 0."""
        return job.duration_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        """Seconds of work done per second, > 0; neighbours by id. Raises `NotMeasured`."""
        return 1.0

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        """How much of its time alone here it sends over links between nodes, 0 – 1."""
        return 0.0

    def traffic(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        """Node → what it takes of that node's memory bandwidth, 0 – 1; nodes of which that is not known are left out."""
        return {}

    def start_up_s(self, job: TraceJob) -> float:
        """Seconds after each start in which nothing is done and its GPUs idle, ≥ 0."""
        return 0.0

    def save_s(self, job: TraceJob) -> float:
        """Seconds after its work in which it still holds everything and its GPUs idle, ≥ 0."""
        return 0.0

    def loss(self, job: TraceJob, progress: float) -> float | None:
        """Its training loss at a share of its work, 0 – 1; None: it reports none."""
        return None


class Constant(JobModel):
    """Job model `constant`: a job runs as long as its trace says, wherever it is placed."""

    name = "constant"


class Around(JobModel):
    """A job model around another: what it does not change is the inner one's. Its neighbours matter."""

    neighbours_matter = True

    def __init__(self, inner: JobModel) -> None:
        self.inner = inner
        self.knows_shapes = inner.knows_shapes

    def work_s(self, job: TraceJob) -> float:
        return self.inner.work_s(job)

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        return self.inner.speed(job, placement, neighbours)

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        return self.inner.network_share(job, placement)

    def traffic(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        return self.inner.traffic(job, placement)

    def start_up_s(self, job: TraceJob) -> float:
        return self.inner.start_up_s(job)

    def save_s(self, job: TraceJob) -> float:
        return self.inner.save_s(job)

    def loss(self, job: TraceJob, progress: float) -> float | None:
        return self.inner.loss(job, progress)


class End(NamedTuple):
    """A job has done all since `at_s`."""

    job_id: str
    at_s: float


class PhaseChange(NamedTuple):
    """A job has come to a phase of its run. Source: Liquid §6.1 (launch, train, save)."""

    job_id: str
    phase: Phase
    at_s: float


class LossReport(NamedTuple):
    """A job has reported its loss; `progress`: share of its work done, 0 – 1."""

    job_id: str
    loss: float
    progress: float
    at_s: float


class Checkpoint(NamedTuple):
    """A job has saved its state, as it was ordered to."""

    job_id: str
    at_s: float


@dataclass(slots=True)
class Charges:
    """GPU seconds that restarts took so far, over all jobs."""

    save_gpu_s: float = 0.0
    launch_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    """Work that was done and has to be done again, at the jobs' speed alone."""


class Pace(NamedTuple):
    """How fast a job runs from now on."""

    job_id: str
    job: TraceJob
    work_s: float
    """Its size: seconds alone on what it asked for."""
    speed: float
    """Seconds of work per second; 0: it does not compute."""
    traffic: Mapping[str, float]
    """As `JobModel.traffic`."""


class Instant(NamedTuple):
    """What the jobs did up to a moment; each part in order of time."""

    ended: Sequence[End]
    progress: Sequence[JobProgress]
    """What jobs report of themselves."""
    phases: Sequence[PhaseChange] = ()
    losses: Sequence[LossReport] = ()
    checkpoints: Sequence[Checkpoint] = ()


class Work:
    """The running jobs and what is left of them. Times never go back. This one's jobs never end."""

    def __init__(self) -> None:
        self.charges = Charges()

    def alone_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on what it asked for, without start-up."""
        return 0.0

    def start_up_s(self, job: TraceJob) -> float:
        """Seconds after each of its starts in which nothing is done, ≥ 0."""
        return 0.0

    def save_s(self, job: TraceJob) -> float:
        """Seconds after its work in which it still holds everything, ≥ 0."""
        return 0.0

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        """The job exists; the first progress it reports, if any."""
        return None

    def launching(self, job_id: str, placement: Placement, now_s: float) -> None:
        """All of its tasks launch, before their GPUs are free; `started` follows when they are, or `stopped`."""

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        """All of its tasks run."""

    def stopped(self, job_id: str, now_s: float) -> None:
        """Its attempt is over, whether it ran or not."""

    def changed(self, job_id: str, placement: Placement, now_s: float) -> None:
        """Its tasks have other cores, or another cap of memory bandwidth, from now on: its speed changes, and its neighbours'."""

    def share(self, job_id: str, now_s: float) -> float | None:
        """How much of its work a running job has done, 0 – 1; None where that is not known between its moments."""
        return None

    def saving_s(self, job_id: str, now_s: float) -> float:
        """How long a job that is asked to stop now goes on holding everything, because it saves; ≥ 0."""
        return 0.0

    def gone(self, job_id: str, now_s: float, *, killed: bool) -> None:
        """After `stopped`: its first process has ended, `killed` before it had done what it does at its end."""

    def checkpoint(self, job_id: str, now_s: float) -> None:
        """It is ordered to save its state; ignored by jobs that do not train."""

    def paces(self) -> Sequence[Pace]:
        """Of jobs whose speed was set since the last call, where a service reads telemetry (`watched`)."""
        return ()

    def next_s(self) -> float | None:
        """The next moment at which something happens by itself; None while nothing runs."""
        return None

    def advance(self, now_s: float) -> Instant:
        """Lets the work flow until `now_s`: called at `next_s` and at every arrival."""
        return Instant((), ())
