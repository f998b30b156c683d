"""State of the estimator: the fold of the cell's ledger, as far as estimates need it.
`evolve` is the only writer."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import one_line
from penstock.ledger.derived.memory import KERNEL_KILL, outgrown_mib
from penstock.ledger.record.record import GENESIS, Head, UnfoldableRecord, read_valid
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated, StagesProfiled
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, Role, TaskPlacement, Usage
from penstock.model.schema.event import UnknownFact, wire_type
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.fold import disturbances
from penstock_services.estimator.core.fold.earlier import Peak, Saved
from penstock_services.estimator.core.fold.live import At, LiveJob, info_of_attempt, without_texts
from penstock_services.estimator.core.fold.progress import (
    Progress,
    Published,
    begun,
    measured_steps,
    steps_of,
)
from penstock_services.estimator.core.interference import Interference
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.conditions import Disturbance, Holders, comparable
from penstock_services.estimator.core.records.history import UNKNOWN, History, Run, bounded
from penstock_services.estimator.core.records.runs import (
    NO_CARD,
    Allocation,
    EstimateSummary,
    FinishedRun,
    estimate_summary,
    implausible,
    job_info,
)
from penstock_services.estimator.core.resources.cores import PastCores
from penstock_services.estimator.core.resources.memory_kills import REASON, Exhausted
from penstock_services.estimator.core.resources.nearest import Nearest
from penstock_services.estimator.core.stages.registry import Owned, StageRegistry

MAX_EARLY = 10_000  # estimates that the ledger holds before their job, as many as the placer caches
MAX_FORGOTTEN = 1_000_000  # ids of dropped ones: 100 MB; reached only if the placer lags as far
ASKED_TO_STOP = frozenset({"preempted", "migrated", "drained"})  # reasons of `JobRequeued` after a SIGTERM

Memory = Literal["host_memory", "gpu_memory"]


@dataclass(slots=True)
class State:
    """Fold of the records up to `head`: tables learned from runs, the nodes, and the live jobs."""

    jobs_topic: str
    jobs_partition: int
    history: History = field(default_factory=History)
    nearest: Nearest = field(default_factory=Nearest)
    past_cores: PastCores = field(default_factory=PastCores)
    kills: Exhausted = field(default_factory=Exhausted)
    stages: StageRegistry = field(default_factory=StageRegistry)
    interference: Interference = field(default_factory=Interference)
    nodes: NodeCapacity = field(default_factory=NodeCapacity)
    live: dict[str, LiveJob] = field(default_factory=dict)
    stepped: dict[str, str] = field(default_factory=dict)
    """Live job → id of the event by which it last reported steps; removed by the caller that answers it."""
    learning: bool = True
    """Whether ended runs are learned; not while records are folded whose runs are known already."""
    finished: list[FinishedRun] = field(default_factory=list)
    """Every succeeded run, sound or not, and every worker that was killed for its memory; the caller that
    stores them removes them."""
    stage_rows: list[Owned] = field(default_factory=list)
    """Likewise."""
    head: Head = GENESIS
    jobs_offset: int = 0
    """Offset after the last record of the jobs partition that the placer answered."""
    void: int = 0
    """Records that broke the chain and were skipped (LAW 3)."""
    early: OrderedDict[str, EstimateSummary] = field(default_factory=OrderedDict)
    """Estimates of jobs that the ledger does not hold yet."""
    forgotten_early: OrderedDict[str, None] = field(default_factory=OrderedDict)
    estimate_again: list[str] = field(default_factory=list)
    """Jobs whose estimate came too early, and those whose next attempt is to be estimated anew."""
    job_of_task: dict[str, str] = field(default_factory=dict)
    """Of worker tasks."""
    job_of_server: dict[str, str] = field(default_factory=dict)
    """Of parameter-server tasks."""
    holders: Holders = field(default_factory=Holders)
    recall_seq: int | None = None
    """Number of the oldest placement of a job that ran in the snapshot with which the fold began."""

    @property
    def seq(self) -> int:
        """Number of the last valid record."""
        return self.head.seq

    def fold(self, value: bytes, offset: int = -1) -> bool:
        """Folds one record of the ledger's partition, in order; `offset`: -1 if it comes from no log. Returns
        False for a void one.

        Raises `UndecodableRecord`, after which the state is of no more use."""
        found = read_valid(self.head, value)
        if found is None:
            self.void += 1
            return False
        self.head, record = found
        cause = record.cause
        if (cause.topic, cause.partition) == (self.jobs_topic, self.jobs_partition):
            self.jobs_offset = max(self.jobs_offset, cause.offset + 1)
        at = At(record.seq, record.now_ms, cause.event_id)
        for n, fact in enumerate(record.facts):
            if fact.type in HANDLERS or fact.needs:
                event = record.event(fact, offset)
                try:
                    evolve(self, at, fact.type, event)
                except Exception as error:
                    raise UnfoldableRecord(offset, record.seq, fact.type, n, one_line(error)) from error
        return True

    def unestimated(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """(job id, job, spec) of jobs without an estimate in the ledger, oldest first."""
        return [(job_id, job, job.spec) for job_id, job in self.live.items() if job.spec is not None]

    def forgotten(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """As `unestimated`, of jobs whose estimate came so early that the placer had to drop it, and of jobs
        whose next attempt is to be estimated anew: it waits for that, or backs off; once each."""
        again, self.estimate_again = self.estimate_again, []
        found = [(job_id, self.live[job_id]) for job_id in again if job_id in self.live]
        return [(job_id, job, job.spec) for job_id, job in found if job.spec is not None]

    def progress_of(self, task_id: str) -> Progress | None:
        """Progress of a worker's job."""
        job = self.live.get(self.job_of_task.get(task_id, ""))
        return None if job is None else job.progress


def evolve(state: State, at: At, kind: str, fact: Any) -> None:
    """Applies one fact; `kind`: its wire type. Types that estimates do not need change nothing."""
    handler = HANDLERS.get(kind)
    if handler is not None and not isinstance(fact, UnknownFact):
        handler(state, at, fact)


def _input_accepted(state: State, at: At, fact: ledger_events.InputAccepted) -> None:
    if (fact.topic, fact.partition) == (state.jobs_topic, state.jobs_partition):
        state.jobs_offset = fact.offset


def _submitted(state: State, at: At, fact: external_events.JobSubmitted) -> None:
    early = state.early.pop(fact.job_id, None)
    if state.forgotten_early.pop(fact.job_id, "") is None:
        state.estimate_again.append(fact.job_id)
    spec = None if early is not None else fact.spec
    event_id = at.event_id or fact.job_id
    state.live[fact.job_id] = LiveJob(job_info(fact.spec), spec, event_id, early, without_texts(fact.spec))


def _requeued(state: State, at: At, fact: ledger_events.JobRequeued) -> None:
    job = state.live.get(fact.job_id)
    if job is None:
        return
    if job.progress is not None:
        card = NO_CARD if job.allocation is None else job.allocation.card
        saves = job.contract == "signal" and fact.reason in ASKED_TO_STOP
        job.earlier.over(job.progress, len(job.workers), card, at.now_ms, saves=saves)
    disturbances.left(state.live, state.holders, job.workers, at.now_ms)
    if fact.estimate_again:
        job.estimate = None
    if fact.estimate_again or fact.not_before_ms is not None:
        job.spec, job.attempt = job.asked, fact.attempt + 1
        state.estimate_again.append(fact.job_id)


def _queued(state: State, at: At, fact: ledger_events.JobQueued) -> None:
    """A retry's back-off is over: it uses its present estimate."""
    if (job := state.live.get(fact.job_id)) is not None:
        job.spec = None


def _estimated(state: State, at: At, fact: JobEstimated) -> None:
    job = state.live.get(fact.job_id)
    if job is not None:
        job.spec = None
        job.estimate = estimate_summary(fact.estimate)
        return
    state.early[fact.job_id] = estimate_summary(fact.estimate)
    if len(state.early) > MAX_EARLY:
        state.forgotten_early[state.early.popitem(last=False)[0]] = None
        if len(state.forgotten_early) > MAX_FORGOTTEN:
            state.forgotten_early.popitem(last=False)


def _placed(state: State, at: At, fact: ledger_events.PlacementDecided) -> None:
    job = state.live.get(fact.job_id)
    if job is None:
        return
    _drop_attempt(state, at, fact.job_id, job)
    job.earlier.begin({place.node_id for place in fact.tasks}, job.contract)
    workers = [place for place in fact.tasks if place.role == "worker"]
    job.info = info_of_attempt(job, len(workers))
    job.allocation = state.nodes.allocation_of(workers)
    job.workers = dict.fromkeys(place.task_id for place in workers)
    tasks_of(state, fact.job_id, job, fact.tasks)
    job.progress = begun(fact.attempt, at.now_ms, workers, job.allocation.card.model, job.progress)
    state.job_of_task.update(dict.fromkeys(job.workers, fact.job_id))
    disturbances.came(state.live, state.holders, fact.job_id, workers, at.now_ms)


def tasks_of(state: State, job_id: str, job: LiveJob, places: Sequence[TaskPlacement]) -> None:
    """Records the parameter servers of an attempt, and the caps of all its tasks."""
    job.servers = tuple(place.task_id for place in places if place.role == "ps")
    state.job_of_server.update(dict.fromkeys(job.servers, job_id))
    limits: dict[str, int] = {}
    for place in places:
        limits[place.role] = min(place.cap_mib, limits.get(place.role, place.cap_mib))
    job.limits_mib = limits


def _exited(state: State, at: At, fact: external_events.TaskExited) -> None:
    server_of = state.job_of_server.get(fact.task_id, "")
    job_id = state.job_of_task.get(fact.task_id, server_of)
    job = state.live.get(job_id)
    if job is None or job.allocation is None:
        return
    disturbances.left(state.live, state.holders, (fact.task_id,), at.now_ms)
    memory = fact.exhausted or ("host_memory" if fact.cause == KERNEL_KILL else "")
    if memory and state.learning:
        role: Role = "ps" if server_of else "worker"
        _ran_out(state, at, job_id, job, job.allocation, role, memory, fact)
    if server_of:
        return
    if fact.cause != "exited" or fact.exit_code != 0:
        if not memory:
            _peak(job, fact.usage)
        return
    used, run_ms = fact.usage, float(fact.exited_ms - fact.started_ms)
    if job.progress is not None:
        task = job.progress.task(fact.task_id)
        task.exited(fact.exited_ms)
        run_ms -= task.waited_ms
    job.exits.append(
        Run(
            ended_ms=at.now_ms,
            seq=at.seq,
            run_ms=run_ms if run_ms >= 0 else UNKNOWN,
            gpus=job.allocation.gpus,
            busy_cores=bounded(used.cpu_ms) / run_ms if run_ms > 0 else UNKNOWN,
            host_memory_mib=bounded(used.host_memory_mib),
            gpu_memory_mib=bounded(used.gpu_memory_mib),
            gpu_utilisation_percent=bounded(used.gpu_utilisation_percent),
            gpu_utilisation_std=bounded(used.gpu_utilisation_std),
        )
    )


def _peak(job: LiveJob, used: Usage) -> None:
    """Peak of a task that did not succeed.
    GPU memory is measured on the device and includes a neighbour's."""
    alone = job.progress is not None and not job.progress.disturbed & Disturbance.SHARED
    gpu_mib = bounded(used.gpu_memory_mib) if alone else UNKNOWN
    job.earlier.peak = job.earlier.peak.or_more(Peak(bounded(used.host_memory_mib), gpu_mib))


def _lost(state: State, at: At, fact: ledger_events.TaskLost | external_events.OrderRefused) -> None:
    disturbances.left(state.live, state.holders, (fact.task_id,), at.now_ms)


def _adjusted(state: State, at: At, fact: CoresDecided | BandwidthDecided) -> None:
    if (job := state.live.get(fact.job_id)) is not None:
        disturbances.adjusted(job, fact, at.now_ms)


def _checkpointed(state: State, at: At, fact: external_events.TaskCheckpointed) -> None:
    if (job := state.live.get(state.job_of_task.get(fact.task_id, ""))) is not None:
        job.earlier.saved = Saved(at.now_ms, fact.node_id, fact.shared)


def _fetched(state: State, at: At, fact: external_events.CheckpointFetched) -> None:
    if (job := state.live.get(state.job_of_task.get(fact.task_id, ""))) is not None:
        job.earlier.fetched(fact.node_id, whole=not fact.problem)


def _ran_out(
    state: State,
    at: At,
    job_id: str,
    job: LiveJob,
    allocation: Allocation,
    role: Role,
    memory: Memory,
    fact: external_events.TaskExited,
) -> None:
    """A task ran out of memory: what it had is a lower bound of its need, and nothing else is learned from
    the run."""
    estimate = job.estimate
    if memory == "gpu_memory":
        limit_mib = fact.gpu_memory_limit_mib or _gpu_limit_mib(allocation, estimate)
        what = f"with {limit_mib} MiB of GPU memory"
    else:
        promised_mib = estimate.host_memory_mib if estimate is not None and role == "worker" else 0
        cap_mib = max(job.limits_mib.get(role, 0), promised_mib)
        limit_mib = outgrown_mib(cap_mib, promised_mib, fact)
        what = f"{'a parameter server ' if role == 'ps' else ''}killed with {limit_mib} MiB of host memory"
    measured = Run(ended_ms=at.now_ms, seq=at.seq)
    why = f"{REASON}: {what}"
    info = job.info if job.asked is None else info_of_attempt(job, job.asked.fewest_workers)
    run = FinishedRun(at.seq, job_id, info, allocation, estimate, measured, why)
    _finish(state, run._replace(limit_mib=limit_mib, exhausted=memory, role=role))


def _gpu_limit_mib(allocation: Allocation, estimate: EstimateSummary | None, *, shared: bool = False) -> int:
    """GPU memory limit of each worker: its card's memory, or the promised part of a shared card. `shared`:
    companions had whole cards with it."""
    if allocation.gpu_share_milli == WHOLE_GPU and not shared:
        return allocation.card.memory_mib if allocation.gpus else 0
    return 0 if estimate is None else estimate.gpu_memory_mib


def _ended(state: State, at: At, fact: ledger_events.JobEnded) -> None:
    job = state.live.pop(fact.job_id, None)
    if job is None:
        return
    teaches = fact.outcome == "succeeded" and state.learning and not job.partly
    if teaches and job.exits and job.allocation is not None:
        _succeeded(state, at, fact.job_id, job, job.allocation)
    _drop_attempt(state, at, fact.job_id, job)
    state.stepped.pop(fact.job_id, None)


def _succeeded(state: State, at: At, job_id: str, job: LiveJob, allocation: Allocation) -> None:
    measured = whole_job(job.exits)._replace(total_gpus=allocation.gpus * max(1, len(job.workers)))
    measured = job.earlier.with_peaks(measured, len(job.workers), allocation.card)
    steps, steps_rejected, eta, corrected = None, "", None, ""
    if job.progress is not None:
        steps, steps_rejected = steps_of(job.progress)
        disturbed = float(int(job.progress.met(at.now_ms)))
        measured = measured._replace(disturbed=disturbed, **measured_steps(job.progress, steps))
        measured, corrected = job.earlier.whole(measured, job.progress, len(job.workers), job.contract)
        eta = job.progress.eta_at_half(at.now_ms)
    why = implausible(measured, allocation)
    if job.info.profiled:
        measured = measured._replace(run_ms=UNKNOWN, iterations=UNKNOWN)
    run = FinishedRun(
        at.seq, job_id, job.info, allocation, job.estimate, measured, why, steps, steps_rejected, eta
    )
    _finish(state, run._replace(limit_mib=job.limits_mib.get("worker", 0), corrected=corrected))


def _finish(state: State, run: FinishedRun) -> None:
    learn(state, run)
    state.finished.append(run)


def learn(state: State, run: FinishedRun) -> None:
    """Adds a finished run, or a task that ran out of memory, to the tables;
    in the order in which they ended."""
    promised_mib = 0 if run.estimate is None else run.estimate.host_memory_mib
    if run.rejected.startswith(REASON):
        limit_mib = run.limit_mib if run.exhausted else promised_mib  # earlier versions stored no limit
        state.kills.add(run.info, run.exhausted, run.role, limit_mib)
    elif not run.rejected:
        state.history.add(run.info.key, run.measured, run.info.owner)
        state.nearest.add(run.info, run.measured)
        state.past_cores.add(run.info, run.allocation, run.measured)
        shared = not comparable("gpu_memory_mib", run.measured.disturbed)
        gpu_mib = _gpu_limit_mib(run.allocation, run.estimate, shared=shared)
        state.kills.ran(run.info, max(run.limit_mib, promised_mib), gpu_mib)


def _drop_attempt(state: State, at: At, job_id: str, job: LiveJob) -> None:
    if state.learning:
        disturbances.measured(state.live, state.interference, job_id, job)
    disturbances.left(state.live, state.holders, job.workers, at.now_ms)
    for task_id in job.workers:
        state.job_of_task.pop(task_id, None)
    for task_id in job.servers:
        state.job_of_server.pop(task_id, None)
    job.servers, job.limits_mib = (), {}
    job.workers, job.allocation, job.exits, job.partly = {}, None, [], False


def _node(state: State, at: At, fact: external_events.NodeJoined | external_events.NodeChanged) -> None:
    state.nodes.put(fact.node)


def _node_lost(state: State, at: At, fact: ledger_events.NodeLost) -> None:
    state.nodes.remove(fact.node_id)


def _started(state: State, at: At, fact: external_events.TaskStarted) -> None:
    if (progress := state.progress_of(fact.task_id)) is not None:
        progress.start(fact.task_id, fact.started_ms, at.now_ms)


def _phase(state: State, at: At, fact: external_events.TaskPhaseChanged) -> None:
    if (progress := state.progress_of(fact.task_id)) is not None:
        progress.task(fact.task_id).changed(fact.phase, fact.at_ms)


def _stepped(state: State, at: At, fact: external_events.StepsMeasured) -> None:
    progress = state.progress_of(fact.task_id)
    if progress is not None and progress.step(fact, at.now_ms):
        job_id = state.job_of_task[fact.task_id]
        state.stepped[job_id] = at.event_id or f"{job_id}-{at.seq}"


def _eta(state: State, at: At, fact: EtaEstimated) -> None:
    job = state.live.get(fact.job_id)
    if job is not None and job.progress is not None and job.progress.attempt == fact.attempt:
        left = Bounds(fact.left_ms.middle, fact.left_ms.low, fact.left_ms.high)
        job.progress.publish(Published(fact.at_ms, left, fact.done))


def _stages(state: State, at: At, fact: external_events.StagesMeasured) -> None:
    job = state.live.get(state.job_of_task.get(fact.task_id, ""))
    if job is None or job.allocation is None or not state.learning:
        return
    gpus, share_milli = job.allocation.gpus * len(job.workers), job.allocation.gpu_share_milli
    began_ms = at.now_ms - math.ceil(sum(sample.lasted_ms for sample in fact.samples))
    disturbed = job.disturbed_since(began_ms)
    row = state.stages.measured(job.info, gpus, share_milli, fact, at.event_id, at.seq, disturbed=disturbed)
    if row is not None:
        state.stage_rows.append(row)


def _stages_published(state: State, at: At, fact: StagesProfiled) -> None:
    if state.learning and (row := state.stages.published(fact, at.seq)) is not None:
        state.stage_rows.append(row)


def whole_job(exits: list[Run]) -> Run:
    """One run from its workers' exits (at least one): the largest of each field, the mean of utilisation."""
    columns = [[value for value in column if value == value] for column in zip(*exits, strict=True)]
    largest = Run(*(max(column) if column else UNKNOWN for column in columns))
    utilisation = columns[Run._fields.index("gpu_utilisation_percent")]
    if not utilisation:
        return largest
    return largest._replace(gpu_utilisation_percent=sum(utilisation) / len(utilisation))


HANDLERS: Mapping[str, Callable[[State, At, Any], None]] = MappingProxyType(
    {
        wire_type(ledger_events.InputAccepted): _input_accepted,
        wire_type(external_events.JobSubmitted): _submitted,
        wire_type(ledger_events.TaskLost): _lost,
        wire_type(external_events.OrderRefused): _lost,
        wire_type(CoresDecided): _adjusted,
        wire_type(BandwidthDecided): _adjusted,
        wire_type(external_events.TaskCheckpointed): _checkpointed,
        wire_type(external_events.CheckpointFetched): _fetched,
        wire_type(JobEstimated): _estimated,
        wire_type(ledger_events.JobRequeued): _requeued,
        wire_type(ledger_events.JobQueued): _queued,
        wire_type(ledger_events.PlacementDecided): _placed,
        wire_type(external_events.TaskExited): _exited,
        wire_type(ledger_events.JobEnded): _ended,
        wire_type(external_events.NodeJoined): _node,
        wire_type(external_events.NodeChanged): _node,
        wire_type(external_events.TaskStarted): _started,
        wire_type(external_events.TaskPhaseChanged): _phase,
        wire_type(external_events.StepsMeasured): _stepped,
        wire_type(EtaEstimated): _eta,
        wire_type(ledger_events.NodeLost): _node_lost,
        wire_type(external_events.StagesMeasured): _stages,
        wire_type(StagesProfiled): _stages_published,
    }
)
"""Wire type of a fact → the function that applies it to the state."""
