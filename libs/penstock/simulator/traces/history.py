"""Export of a cell's jobs from its ledger: a fold over its events gives a trace to simulate.

A job's run time is measured by the ledger's own clock: from the moment when all its tasks ran to the moment
when the last had ended or the attempt was ordered to stop; all attempts together. A job that never ran has
none: it cannot be part of a trace, and is counted. A job that still runs counts with its run time so far: up
to the last record of a file, or up to the present time of a cell.

The gateway streams only the events that it still has, so the first of them may be about jobs without earlier
events: no state of the cell can be folded from them, so this module reads single events.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions import ledger_events as ledger
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import ResourceVector
from penstock.model.schema.event import Event
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob

MIN_RUN_MS = 1  # a trace has no job of length 0; the ledger counts whole milliseconds
STILL_RUNNING = "running"


@dataclass(slots=True)
class _Life:
    """One job so far."""

    submitted_ms: int
    spec: JobSpec
    worker: ResourceVector | None = None
    """Resources of a worker, as estimated before its placement."""
    gpus: int | None = None
    """GPUs of its workers, once placed."""
    workers: int | None = None
    server_gpus: int = 0
    """GPUs of each of its parameter servers."""
    starting: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)
    began_ms: int | None = None
    ran_ms: int = 0
    outcome: str = ""

    def pause(self, at_ms: int) -> None:
        if self.began_ms is not None:
            self.ran_ms += at_ms - self.began_ms
            self.began_ms = None


class Left(NamedTuple):
    """Numbers of jobs that are not in the trace, or not with their final run time."""

    never_ran: int
    still_running: int
    """In the trace, with the run time so far."""
    unknown: int
    """Submitted before the first record of the ledger."""


class PastJob(NamedTuple):
    """A job of the past with its outcome."""

    job: TraceJob
    outcome: str


class History:
    """Fold of a ledger's events into past jobs; takes them in the order of the ledger."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeSpec] = {}
        """All nodes that ever joined, with their latest specs."""
        self.first_ms: int | None = None
        """Time of the first record; None: there was none."""
        self.last_ms = 0
        """Time of the last record, or the cell's present time."""
        self.replica = Replica()
        self._lives: dict[str, _Life] = {}
        self._owners: dict[str, str] = {}
        self._unknown: set[str] = set()

    def see(self, record: RawRecord, n: int, event: Event) -> None:
        """The replica's hook."""
        at_ms = record.now_ms
        self.first_ms = at_ms if self.first_ms is None else self.first_ms
        self.last_ms = max(self.last_ms, at_ms)
        match event:
            case external_events.NodeJoined() | external_events.NodeChanged():
                self.nodes[event.node.node_id] = event.node
            case external_events.JobSubmitted():
                self._lives.setdefault(event.job_id, _Life(at_ms, event.spec))
            case external_events.TaskStarted():
                self._started(at_ms, event.task_id)
            case external_events.TaskExited() | external_events.OrderRefused() | ledger.TaskLost():
                self._task_ended(at_ms, event.task_id)
            case JobEstimated() | ledger.PlacementDecided() | ledger.StopDecided() | ledger.JobEnded():
                life = self._lives.get(event.job_id)
                if life is None:
                    self._unknown.add(event.job_id)
                else:
                    self._changed(life, at_ms, event)

    def until(self, at_ms: int) -> None:
        """Advances the time: running jobs have run on up to `at_ms`."""
        self.last_ms = max(self.last_ms, at_ms)

    def _changed(self, life: _Life, at_ms: int, event: Event) -> None:
        match event:
            case JobEstimated():
                life.worker = event.estimate.worker if life.gpus is None else life.worker
            case ledger.PlacementDecided():
                life.gpus = sum(len(place.gpus) for place in event.tasks if place.role == "worker")
                life.server_gpus = max(
                    (len(place.gpus) for place in event.tasks if place.role == "ps"), default=0
                )
                life.workers = sum(place.role == "worker" for place in event.tasks)
                life.starting = {place.task_id for place in event.tasks}
                life.alive = set(life.starting)
                self._owners.update(dict.fromkeys(life.alive, event.job_id))
            case ledger.StopDecided():
                life.starting.add("")  # a late start then does not begin a run
                life.pause(at_ms)
            case ledger.JobEnded():
                life.pause(at_ms)
                life.outcome = event.outcome

    def _started(self, at_ms: int, task_id: str) -> None:
        job_id = self._owners.get(task_id)
        if job_id is not None:
            life = self._lives[job_id]
            life.starting.discard(task_id)
            if not life.starting and life.began_ms is None and life.alive:
                life.began_ms = at_ms

    def _task_ended(self, at_ms: int, task_id: str) -> None:
        job_id = self._owners.pop(task_id, None)
        if job_id is not None:
            life = self._lives[job_id]
            life.alive.discard(task_id)
            if not life.alive:
                life.pause(at_ms)

    def jobs(self, from_ms: int | None = None, until_ms: int | None = None) -> tuple[list[PastJob], Left]:
        """The jobs submitted in the window, in order; times count from its begin, or from the first job.

        A window that begins before the first record begins at that record.
        """
        chosen = {
            job_id: life
            for job_id, life in self._lives.items()
            if (from_ms is None or life.submitted_ms >= from_ms)
            and (until_ms is None or life.submitted_ms < until_ms)
        }
        ran = {
            job_id: life
            for job_id, life in chosen.items()
            if life.ran_ms or life.began_ms is not None or life.outcome == "succeeded"
        }
        base_ms = min((life.submitted_ms for life in ran.values()), default=0)
        if from_ms is not None:
            base_ms = max(from_ms, self.first_ms or 0)
        found = [self._past_job(job_id, life, base_ms) for job_id, life in ran.items()]
        running = sum(1 for one in found if one.outcome == STILL_RUNNING)
        return found, Left(len(chosen) - len(ran), running, len(self._unknown))

    def _past_job(self, job_id: str, life: _Life, base_ms: int) -> PastJob:
        spec, need = (
            life.spec.shaped(life.workers or life.spec.fewest_workers),
            life.worker or life.spec.resources,
        )
        ran_ms = life.ran_ms + (0 if life.began_ms is None else self.last_ms - life.began_ms)
        gpus = spec.workers * (need.gpus or 0) if life.gpus is None else life.gpus
        job = TraceJob(
            job_id=job_id,
            submit_s=(life.submitted_ms - base_ms) / 1_000,
            duration_s=max(MIN_RUN_MS, ran_ms) / 1_000,
            gpus=gpus,
            model=spec.model or "",
            batch_size=spec.batch_size,
            owner=spec.owner,
            cores=None if need.cores is None else float(need.cores * spec.workers),
            host_memory_mib=None if not need.host_memory_mib else need.host_memory_mib * spec.workers,
            gpu_memory_mib=(need.gpu_memory_mib or None) if gpus else None,
            gpu_share_milli=need.gpu_share_milli or WHOLE_GPU_MILLI,
            gpu_models=spec.gpu_models,
            workers=spec.workers,
            parameter_servers=spec.parameter_servers,
            server_gpus=life.server_gpus,
            patience_s=None if spec.queue_timeout_ms is None else spec.queue_timeout_ms / 1_000,
            labels=tuple(spec.labels.items()),
        )
        return PastJob(job, life.outcome or STILL_RUNNING)


def mixed(node: NodeSpec) -> bool:
    """Whether its GPUs are of several kinds: a line of a list of nodes has only one."""
    return len({(gpu.model, gpu.memory_mib) for gpu in node.gpus}) > 1


def node_rows(nodes: Mapping[str, NodeSpec]) -> Iterator[tuple[str, ...]]:
    """Lines of a list of nodes, as `--cluster nodes.csv` reads them; the header first."""
    yield (
        "node_id",
        "cores",
        "host_memory_mib",
        "gpus",
        "gpu_model",
        "gpu_memory_mib",
        "rack",
        "domain",
        "bandwidth_mbps",
    )
    for node in nodes.values():
        first = node.gpus[0] if node.gpus else None
        yield (
            node.node_id,
            str(node.cores),
            str(node.host_memory_mib),
            str(len(node.gpus)),
            first.model if first else "",
            str(first.memory_mib) if first else "",
            node.rack,
            node.domain,
            str(node.bandwidth_mbps),
        )
