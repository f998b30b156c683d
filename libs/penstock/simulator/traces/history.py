"""Export of a cell's jobs from its ledger: a fold over its events gives a trace to simulate.

A job's run time is what was measured by the ledger's own clock: from the moment when all its tasks ran to the one
when the last had ended or the attempt was ordered to stop; all attempts together. A job that never ran has none: it
cannot be part of a trace, and is counted. A job that still runs at the end counts with what it has run so far.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob

MIN_RUN_MS = 1  # a trace has no job of no length; the ledger counts whole milliseconds
STILL_RUNNING = "running"


class _Resources(msgspec.Struct):
    gpus: int | None = None
    cores: int | None = None
    host_memory_mib: int | None = None
    gpu_memory_mib: int | None = None
    gpu_share_milli: int | None = None


class _Spec(msgspec.Struct):
    owner: str = ""
    workers: int = 1
    parameter_servers: int = 0
    resources: _Resources = msgspec.field(default_factory=_Resources)
    model: str | None = None
    batch_size: int | None = None
    gpu_models: tuple[str, ...] = ()
    queue_timeout_ms: int | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class _Submitted(msgspec.Struct):
    job_id: str
    spec: _Spec


class _Estimate(msgspec.Struct):
    worker: _Resources


class _Estimated(msgspec.Struct):
    job_id: str
    estimate: _Estimate


class _Place(msgspec.Struct):
    task_id: str
    role: str = "worker"
    gpus: tuple[int, ...] = ()


class _Placed(msgspec.Struct):
    job_id: str
    tasks: tuple[_Place, ...]


class _Task(msgspec.Struct):
    task_id: str


class _Job(msgspec.Struct):
    job_id: str


class _Ended(msgspec.Struct):
    job_id: str
    outcome: str


class _Gpu(msgspec.Struct):
    model: str
    memory_mib: int


class NodeLine(msgspec.Struct):
    """A node as its reporter found it."""

    node_id: str
    cores: int
    host_memory_mib: int
    rack: str = "rack-0"
    domain: str = "domain-0"
    bandwidth_mbps: int = 10_000
    gpus: tuple[_Gpu, ...] = ()

    @property
    def mixed(self) -> bool:
        """Whether its GPUs are of several kinds: a line holds only one."""
        return len({(gpu.model, gpu.memory_mib) for gpu in self.gpus}) > 1


class _Joined(msgspec.Struct):
    node: NodeLine


@dataclass(slots=True)
class _Life:
    """One job so far."""

    submitted_ms: int
    spec: _Spec
    need: _Resources | None = None
    gpus: int | None = None
    """Of its workers, once placed."""
    server_gpus: int = 0
    """Of each of its parameter servers."""
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
    """Jobs that are not in the trace, or not as they will be: counts."""

    never_ran: int
    still_running: int
    """In it, with the time so far."""
    unknown: int
    """Submitted before the first record of the ledger."""


class PastJob(NamedTuple):
    """A job of the past, and how it ended."""

    job: TraceJob
    outcome: str


class History:
    """Takes facts in the order of the ledger."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeLine] = {}
        """All that ever joined, each as it was last."""
        self.last_ms = 0
        self._lives: dict[str, _Life] = {}
        self._owners: dict[str, str] = {}
        self._unknown: set[str] = set()

    def take(self, at_ms: int, kind: str, data: bytes | msgspec.Raw) -> None:
        """One fact; `kind` without its version. Raises `msgspec.DecodeError` for data that is none of its kind."""
        self.last_ms = max(self.last_ms, at_ms)
        found = _TAKERS.get(kind)
        if found is not None:
            shape, take = found
            take(self, at_ms, msgspec.json.decode(data, type=shape))

    def jobs(self, from_ms: int | None = None, until_ms: int | None = None) -> tuple[list[PastJob], Left]:
        """Those submitted in the window, in order; times count from its begin, or from the first of them."""
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
        base_ms = min((life.submitted_ms for life in ran.values()), default=0) if from_ms is None else from_ms
        found = [self._past_job(job_id, life, base_ms) for job_id, life in ran.items()]
        running = sum(1 for one in found if one.outcome == STILL_RUNNING)
        return found, Left(len(chosen) - len(ran), running, len(self._unknown))

    def _past_job(self, job_id: str, life: _Life, base_ms: int) -> PastJob:
        spec, need = life.spec, life.need or life.spec.resources
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

    # ------------------------------------------------------------------------------------------ facts

    def _submitted(self, at_ms: int, fact: _Submitted) -> None:
        self._lives.setdefault(fact.job_id, _Life(at_ms, fact.spec))

    def _life(self, job_id: str) -> _Life | None:
        life = self._lives.get(job_id)
        if life is None:
            self._unknown.add(job_id)
        return life

    def _estimated(self, at_ms: int, fact: _Estimated) -> None:
        life = self._life(fact.job_id)
        if life is not None and life.gpus is None:
            life.need = fact.estimate.worker

    def _placed(self, at_ms: int, fact: _Placed) -> None:
        life = self._life(fact.job_id)
        if life is None:
            return
        life.gpus = sum(len(place.gpus) for place in fact.tasks if place.role == "worker")
        life.server_gpus = max((len(place.gpus) for place in fact.tasks if place.role == "ps"), default=0)
        life.starting = {place.task_id for place in fact.tasks}
        life.alive = set(life.starting)
        for task_id in life.alive:
            self._owners[task_id] = fact.job_id

    def _started(self, at_ms: int, fact: _Task) -> None:
        job_id = self._owners.get(fact.task_id)
        if job_id is None:
            return
        life = self._lives[job_id]
        life.starting.discard(fact.task_id)
        if not life.starting and life.began_ms is None and life.alive:
            life.began_ms = at_ms

    def _gone(self, at_ms: int, fact: _Task) -> None:
        job_id = self._owners.pop(fact.task_id, None)
        if job_id is None:
            return
        life = self._lives[job_id]
        life.alive.discard(fact.task_id)
        if not life.alive:
            life.pause(at_ms)

    def _stopping(self, at_ms: int, fact: _Job) -> None:
        life = self._life(fact.job_id)
        if life is not None:
            life.starting.add("")  # a start that comes late begins nothing
            life.pause(at_ms)

    def _ended(self, at_ms: int, fact: _Ended) -> None:
        life = self._life(fact.job_id)
        if life is not None:
            life.pause(at_ms)
            life.outcome = fact.outcome

    def _joined(self, at_ms: int, fact: _Joined) -> None:
        self.nodes[fact.node.node_id] = fact.node


_TAKERS: Mapping[str, tuple[Any, Callable[[History, int, Any], None]]] = MappingProxyType(
    {
        "penstock.job.submitted": (_Submitted, History._submitted),
        "penstock.job.estimated": (_Estimated, History._estimated),
        "penstock.placement.decided": (_Placed, History._placed),
        "penstock.task.started": (_Task, History._started),
        "penstock.task.exited": (_Task, History._gone),
        "penstock.task.lost": (_Task, History._gone),
        "penstock.order.refused": (_Task, History._gone),
        "penstock.stop.decided": (_Job, History._stopping),
        "penstock.job.ended": (_Ended, History._ended),
        "penstock.node.joined": (_Joined, History._joined),
        "penstock.node.changed": (_Joined, History._joined),
    }
)
"""Kind of a fact, without its version → what is read of it, and by whom."""


def node_rows(nodes: Mapping[str, NodeLine]) -> Iterator[tuple[str, ...]]:
    """Lines of a list of nodes, as `--cluster nodes.csv` reads them; the header first."""
    yield (
        "node_id", "cores", "host_memory_mib", "gpus", "gpu_model", "gpu_memory_mib", "rack", "domain",
        "bandwidth_mbps",
    )  # fmt: skip
    for node in nodes.values():
        first = node.gpus[0] if node.gpus else None
        yield (
            node.node_id, str(node.cores), str(node.host_memory_mib), str(len(node.gpus)),
            first.model if first else "", str(first.memory_mib) if first else "", node.rack, node.domain,
            str(node.bandwidth_mbps),
        )  # fmt: skip
