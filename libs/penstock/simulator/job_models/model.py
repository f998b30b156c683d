"""Interface of job models: progress and ends of simulated jobs.

A *job model* gives the speed of a job; it is measured data, never a model that Penstock's decisions use. The
*work* of a run turns speeds into ends. Most job models share `SteadyWork` (`steady.py`): progress at constant
speed between changes. A job model with other rules of progress brings its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.model.inputs.external_events import JobProgress
from penstock.model.nouns.types import TaskPlacement
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob

Phase = Literal["ready", "train", "save"]


class Allocation(NamedTuple):
    """Resources that a job holds on one node, all of its tasks there together."""

    gpus: tuple[int, ...] = ()
    """Indexes of its GPUs."""
    cores: float = 0
    """A part of one where their time is capped."""
    share_milli: int = WHOLE_GPU_MILLI
    """Thousandths of its GPU; less than a whole one only with one GPU."""
    workers: int = 1
    parameter_servers: int = 0
    host_memory_mib: int = 0
    bandwidth_percent: int | None = None
    """Cap on the share of the node's memory bandwidth for its tasks there together; None: no cap."""


NOTHING = Allocation(workers=0)
Placement = Mapping[str, Allocation]
"""Node id → one job's resources there; nodes in order of rank."""


def allocations(tasks: Iterable[TaskPlacement]) -> Placement:
    """Resources of a gang's tasks, node by node; the tasks in order of rank."""
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


def capped(
    placement: Placement, caps: Iterable[tuple[str, int | None]], by_time: Collection[str]
) -> Placement:
    """The placement with caps of memory bandwidth, ⟨node, percent⟩ for each task. A job has no cap on a node
    where one of its tasks has none.

    `by_time`: nodes on which a cap limits the time of the job's cores; it has so many fewer of them there.
    """
    of_tasks: dict[str, list[int]] = {node_id: [] for node_id in placement}
    uncapped = set()
    for node_id, percent in caps:
        if percent is None:
            uncapped.add(node_id)
        else:
            of_tasks[node_id].append(percent)
    found = dict(placement)
    for node_id in placement.keys() - uncapped:
        held, percents = placement[node_id], of_tasks[node_id]
        found[node_id] = (
            held._replace(cores=held.cores * sum(percents) / len(percents) / 100)
            if node_id in by_time
            else held._replace(bandwidth_percent=min(100, sum(percents)))
        )
    return found


class Neighbour(NamedTuple):
    """Another job that computes on one of a job's nodes."""

    job: TraceJob
    placement: Placement
    traffic: Mapping[str, float]
    """As `JobModel.traffic`."""
    flows: Mapping[str, float]
    """As `JobModel.flows`."""


class NotMeasured(LookupError):
    """The job model's table has no entry for this; the message names the missing entry."""


class JobModel:
    """Performance model of jobs. By default the speed depends only on the job and its own placement."""

    name: str
    neighbours_matter = False
    """Whether a job's speed changes when others start or stop to compute on its nodes."""
    knows_shapes = False
    """Whether it has measurements of a job on other numbers of GPUs than it asked for:
    only then a job may be moldable."""

    def work_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on the requested resources, > 0."""
        return job.duration_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        """Seconds of work done per second, > 0; neighbours by id. Raises `NotMeasured`."""
        return 1.0

    def slowed_by_others(self, job: TraceJob) -> bool:
        """Whether the job's own speed depends on its neighbours."""
        return self.neighbours_matter

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        """Share of its time alone in this placement in which it sends over links between nodes, 0 – 1."""
        return 0.0

    def traffic(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        """Node → share of that node's memory bandwidth that it uses, 0 – 1;
        nodes with unknown use are left out."""
        return {}

    def flows(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        """Node → its flows over that node's link, on average over its time alone;
        where links do not matter, none."""
        return {}

    def neighbour(self, job: TraceJob, placement: Placement) -> Neighbour:
        """What neighbours of the job see of it."""
        return Neighbour(job, placement, self.traffic(job, placement), self.flows(job, placement))

    def start_up_s(self, job: TraceJob) -> float:
        """Seconds after each start without progress, in which its GPUs idle, ≥ 0."""
        return 0.0

    def save_s(self, job: TraceJob) -> float:
        """Seconds after its work in which it still holds all resources and its GPUs idle, ≥ 0."""
        return 0.0

    def loss(self, job: TraceJob, progress: float) -> float | None:
        """Its training loss at a share of its work, 0 – 1; None: it reports no loss."""
        return None


class Constant(JobModel):
    """Job model `constant`: a job runs for the trace's run time, in any placement."""

    name = "constant"


class Around(JobModel):
    """Wrapper of a job model: methods that it does not override are the inner one's.
    Its neighbours matter."""

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

    def flows(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        return self.inner.flows(job, placement)

    def start_up_s(self, job: TraceJob) -> float:
        return self.inner.start_up_s(job)

    def save_s(self, job: TraceJob) -> float:
        return self.inner.save_s(job)

    def loss(self, job: TraceJob, progress: float) -> float | None:
        return self.inner.loss(job, progress)


class End(NamedTuple):
    """A job has completed its work at `at_s`."""

    job_id: str
    at_s: float


class PhaseChange(NamedTuple):
    """A job has entered a phase of its run. Source: Liquid §6.1 (launch, train, save)."""

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
    """A job has saved its state, as ordered."""

    job_id: str
    at_s: float


@dataclass(slots=True)
class Charges:
    """GPU seconds spent on restarts so far, over all jobs."""

    save_gpu_s: float = 0.0
    launch_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    """Lost work that has to be done again, at the jobs' speed alone."""


class Pace(NamedTuple):
    """Speed of a job from now on."""

    job_id: str
    job: TraceJob
    work_s: float
    """Its size: seconds alone on the requested resources."""
    speed: float
    """Seconds of work per second; 0: it does not compute."""
    traffic: Mapping[str, float]
    """See `JobModel.traffic`."""


class Instant(NamedTuple):
    """Events of the jobs up to a moment; each part in order of time."""

    ended: Sequence[End]
    progress: Sequence[JobProgress]
    """Progress reports of jobs."""
    phases: Sequence[PhaseChange] = ()
    losses: Sequence[LossReport] = ()
    checkpoints: Sequence[Checkpoint] = ()


class Work:
    """The running jobs and their remaining work. Times never go back. In this base class jobs never end."""

    def __init__(self) -> None:
        self.charges = Charges()

    def alone_s(self, job: TraceJob) -> float:
        """The job's size: seconds alone on the requested resources, without start-up."""
        return 0.0

    def start_up_s(self, job: TraceJob) -> float:
        """Seconds after each of its starts without progress, ≥ 0."""
        return 0.0

    def save_s(self, job: TraceJob) -> float:
        """Seconds after its work in which it still holds all resources, ≥ 0."""
        return 0.0

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        """Adds a job; returns the first progress that it reports, if any."""
        return None

    def launching(self, job_id: str, placement: Placement, now_s: float) -> None:
        """All of the job's tasks launch before their GPUs are free;
        `started` follows when they are free, or `stopped`."""

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        """All of the job's tasks run."""

    def stopped(self, job_id: str, now_s: float) -> None:
        """The job's attempt is over, whether it ran or not."""

    def changed(self, job_id: str, placement: Placement, now_s: float) -> None:
        """The job's tasks have other cores, or another cap of memory bandwidth, from now on: its speed
        changes, and its neighbours'."""

    def share(self, job_id: str, now_s: float) -> float | None:
        """Share of its work that a running job has done, 0 – 1;
        None if it is not known between its moments."""
        return None

    def saving_s(self, job_id: str, now_s: float) -> float:
        """Seconds for which a job that is asked to stop now still holds all resources,
        because it saves; ≥ 0."""
        return 0.0

    def gone(self, job_id: str, now_s: float, *, killed: bool) -> None:
        """After `stopped`: the job's first process has ended, `killed` before it had completed its save."""

    def checkpoint(self, job_id: str, now_s: float) -> None:
        """Orders a job to save its state; ignored by jobs that do not train."""

    def paces(self) -> Sequence[Pace]:
        """Speeds set since the last call, if a service reads telemetry (`watched`)."""
        return ()

    def next_s(self) -> float | None:
        """The next moment with an event of a job; None while none runs."""
        return None

    def advance(self, now_s: float) -> Instant:
        """Advances the work until `now_s`: called at `next_s` and at every arrival."""
        return Instant((), ())
