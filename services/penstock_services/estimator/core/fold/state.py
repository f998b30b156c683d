"""State of the estimator: the cell's state, folded as by every reader of the ledger, and what estimates need
beside it. Only `see`, the hook of that fold, writes it."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from penstock.ledger.derived.memory import KERNEL_KILL, outgrown_mib
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import MAX_EARLY_ESTIMATES, CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated, StagesProfiled
from penstock.model.nouns.types import WHOLE_GPU, Role, Usage
from penstock.model.schema.event import Event
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.fold import disturbances
from penstock_services.estimator.core.fold.earlier import Peak
from penstock_services.estimator.core.fold.live import At, LiveJob, summary_of
from penstock_services.estimator.core.fold.progress import Published, begun, measured_steps, steps_of
from penstock_services.estimator.core.interference import Interference
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.conditions import Disturbance, comparable
from penstock_services.estimator.core.records.history import UNKNOWN, History, Run, bounded
from penstock_services.estimator.core.records.runs import (
    NO_CARD,
    Allocation,
    EstimateSummary,
    FinishedRun,
    implausible,
    job_info,
)
from penstock_services.estimator.core.resources.cores import PastCores
from penstock_services.estimator.core.resources.memory_kills import REASON, Exhausted
from penstock_services.estimator.core.resources.nearest import Nearest
from penstock_services.estimator.core.stages.registry import Owned, StageRegistry

MAX_FORGOTTEN = 1_000_000  # ids of dropped ones: 100 MB; reached only if the placer lags as far
ASKED_TO_STOP = frozenset({"preempted", "migrated", "drained"})  # reasons of `JobRequeued` after a SIGTERM

Memory = Literal["host_memory", "gpu_memory"]
Ending = external_events.TaskExited | ledger_events.TaskLost | external_events.OrderRefused


@dataclass(slots=True)
class State:
    """The cell up to `replica.head`, tables learned from runs, and what live jobs have beside `JobState`."""

    jobs_topic: str
    jobs_partition: int
    replica: Replica = field(default_factory=Replica)
    history: History = field(default_factory=History)
    nearest: Nearest = field(default_factory=Nearest)
    past_cores: PastCores = field(default_factory=PastCores)
    kills: Exhausted = field(default_factory=Exhausted)
    stages: StageRegistry = field(default_factory=StageRegistry)
    interference: Interference = field(default_factory=Interference)
    nodes: NodeCapacity = field(default_factory=NodeCapacity)
    live: dict[str, LiveJob] = field(default_factory=dict)
    """One for each of the cell's jobs."""
    stepped: dict[str, str] = field(default_factory=dict)
    """Live job → id of the event by which it last reported steps; removed by the caller that answers it."""
    learning: bool = True
    """Whether ended runs are learned; not while records are folded whose runs are known already."""
    finished: list[FinishedRun] = field(default_factory=list)
    """Every succeeded run, sound or not, and every worker that was killed for its memory; the caller that
    stores them removes them."""
    stage_rows: list[Owned] = field(default_factory=list)
    """Likewise."""
    void: int = 0
    """Records that broke the chain and were skipped (LAW 3)."""
    forgotten_early: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Jobs that the ledger does not hold yet, and whose estimate came so early that the cell dropped it."""
    estimate_again: list[str] = field(default_factory=list)
    """Jobs whose estimate came too early, and those whose next attempt is to be estimated anew."""
    recall_seq: int | None = None
    """Number of the oldest placement of a job that ran in the snapshot with which the fold began."""

    @property
    def cell(self) -> CellState:
        return self.replica.state

    @property
    def seq(self) -> int:
        """Number of the last valid record."""
        return self.replica.head.seq

    @property
    def jobs_offset(self) -> int:
        """Offset after the last record of the jobs partition that the placer answered."""
        return self.cell.positions.get((self.jobs_topic, self.jobs_partition), 0)

    def fold(self, value: bytes, offset: int = -1) -> bool:
        """Folds one record of the ledger's partition, in order; `offset`: -1 if it comes from no log. Returns
        False for a void one.

        Raises `UndecodableRecord`, after which the state is of no more use."""
        valid = self.replica.take(value, offset, self.see) is not None
        self.void += not valid
        return valid

    def see(self, record: RawRecord, n: int, fact: Any) -> None:
        """The replica's hook."""
        kind, cell, live = type(fact), self.cell, None
        if kind in OF_TASKS:
            job = job_of_task(cell, fact.node_id, fact.task_id)
            live = None if job is None else self.live[job.job_id]
        elif kind in HANDLERS:
            live = self.live.get(fact.job_id)
        elif kind is JobEstimated:
            _note_dropped(self, fact)
        evolve(cell, fact)
        if live is None and kind not in OF_CELL:
            return
        at = At(record.seq, record.now_ms, record.cause.event_id)
        if live is None:
            OF_CELL[kind](self, at, fact)
        else:
            HANDLERS[kind](self, at, live, fact)

    def unestimated(self) -> list[LiveJob]:
        """Jobs that await an estimate, oldest first."""
        return [live for live in self.live.values() if live.job.awaited_estimate is not None]

    def forgotten(self) -> list[LiveJob]:
        """As `unestimated`, of jobs whose estimate came so early that the placer had to drop it, and of jobs
        whose next attempt is to be estimated anew: it waits for that, or backs off; once each."""
        again, self.estimate_again = self.estimate_again, []
        found = [self.live[job_id] for job_id in again if job_id in self.live]
        return [live for live in found if live.job.awaited_estimate is not None]


def _submitted(state: State, at: At, fact: external_events.JobSubmitted) -> None:
    if state.forgotten_early.pop(fact.job_id, "") is None:
        state.estimate_again.append(fact.job_id)
    job = state.cell.jobs[fact.job_id]
    state.live[job.job_id] = LiveJob(job, job_info(job.spec), at.event_id or job.job_id)


def _note_dropped(state: State, fact: JobEstimated) -> None:
    """Notes the job whose early estimate the cell drops for this one."""
    early, forgotten = state.cell.early_estimates, state.forgotten_early
    known = fact.job_id in state.live or fact.job_id in early
    if not known and len(early) >= MAX_EARLY_ESTIMATES:
        forgotten[next(iter(early))] = None
        if len(forgotten) > MAX_FORGOTTEN:
            forgotten.popitem(last=False)


def _requeued(state: State, at: At, live: LiveJob, fact: ledger_events.JobRequeued) -> None:
    if live.progress is not None:
        card = NO_CARD if live.allocation is None else live.allocation.card
        saves = live.job.spec.checkpoint == "signal" and fact.reason in ASKED_TO_STOP
        live.earlier.over(live.progress, card, live.job.saving.checkpoint, at.now_ms, saves=saves)
    if live.job.awaited_estimate is not None:
        state.estimate_again.append(fact.job_id)


def _placed(state: State, at: At, live: LiveJob, fact: ledger_events.PlacementDecided) -> None:
    _over(state, live)
    job, nodes = live.job, {place.node_id for place in fact.tasks}
    live.earlier.begin(nodes, job.spec.checkpoint, job.saving.checkpoint)
    workers = [place for place in fact.tasks if place.role == "worker"]
    live.info = live.info_of_attempt(len(workers))
    live.allocation = state.nodes.allocation_of(workers)
    live.exits, live.partly = [], False
    live.progress = begun(fact.attempt, at.now_ms, workers, live.allocation.card.model, live.progress)
    disturbances.came(state.cell, state.live, job.job_id)


def _exited(state: State, at: At, live: LiveJob, fact: external_events.TaskExited) -> None:
    role = live.job.tasks[fact.task_id].place.role
    _lost(state, at, live, fact)
    memory = fact.exhausted or ("host_memory" if fact.cause == KERNEL_KILL else "")
    if memory and state.learning:
        _ran_out(state, at, live, role, memory, fact)
    if role == "ps":
        return
    if fact.cause != "exited" or fact.exit_code != 0:
        if not memory:
            _peak(live, fact.usage)
        return
    used, run_ms = fact.usage, float(fact.exited_ms - fact.started_ms)
    if live.progress is not None:
        task = live.progress.task(fact.task_id)
        task.exited(fact.exited_ms)
        run_ms -= task.waited_ms
    live.exits.append(
        Run(
            ended_ms=at.now_ms,
            seq=at.seq,
            run_ms=run_ms if run_ms >= 0 else UNKNOWN,
            gpus=0 if live.allocation is None else live.allocation.gpus,
            busy_cores=bounded(used.cpu_ms) / run_ms if run_ms > 0 else UNKNOWN,
            host_memory_mib=bounded(used.host_memory_mib),
            gpu_memory_mib=bounded(used.gpu_memory_mib),
            gpu_utilisation_percent=bounded(used.gpu_utilisation_percent),
            gpu_utilisation_std=bounded(used.gpu_utilisation_std),
        )
    )


def _peak(live: LiveJob, used: Usage) -> None:
    """Peak of a task that did not succeed.
    GPU memory is measured on the device and includes a neighbour's."""
    alone = live.progress is not None and not live.progress.disturbed & Disturbance.SHARED
    gpu_mib = bounded(used.gpu_memory_mib) if alone else UNKNOWN
    live.earlier.peak = live.earlier.peak.or_more(Peak(bounded(used.host_memory_mib), gpu_mib))


def _lost(state: State, at: At, live: LiveJob, fact: Ending) -> None:
    place = live.job.tasks[fact.task_id].place
    if place.role == "worker":
        disturbances.left(state.cell, state.live, place)


def _adjusted(state: State, at: At, live: LiveJob, fact: CoresDecided | BandwidthDecided) -> None:
    disturbances.adjusted(live, fact, at.now_ms)


def _fetched(state: State, at: At, live: LiveJob, fact: external_events.CheckpointFetched) -> None:
    live.earlier.fetched(whole=not fact.problem)


def _ran_out(
    state: State, at: At, live: LiveJob, role: Role, memory: Memory, fact: external_events.TaskExited
) -> None:
    """A task ran out of memory: what it had is a lower bound of its need, and nothing else is learned from
    the run."""
    job, allocation, estimate = live.job, live.allocation, summary_of(live.job)
    if allocation is None:
        return
    if memory == "gpu_memory":
        limit_mib = fact.gpu_memory_limit_mib or _gpu_limit_mib(allocation, estimate)
        what = f"with {limit_mib} MiB of GPU memory"
    else:
        promised_mib = estimate.host_memory_mib if estimate is not None and role == "worker" else 0
        limit_mib = outgrown_mib(max(_cap_mib(job, role), promised_mib), promised_mib, fact)
        what = f"{'a parameter server ' if role == 'ps' else ''}killed with {limit_mib} MiB of host memory"
    measured = Run(ended_ms=at.now_ms, seq=at.seq)
    why = f"{REASON}: {what}"
    info = live.info_of_attempt(job.spec.fewest_workers)
    run = FinishedRun(at.seq, job.job_id, info, allocation, estimate, measured, why)
    _finish(state, run._replace(limit_mib=limit_mib, exhausted=memory, role=role))


def _cap_mib(job: JobState, role: Role) -> int:
    """The smallest cap on host memory among the tasks of this role; 0: there are none."""
    return min((task.place.cap_mib for task in job.tasks.values() if task.place.role == role), default=0)


def _gpu_limit_mib(allocation: Allocation, estimate: EstimateSummary | None, *, shared: bool = False) -> int:
    """GPU memory limit of each worker: its card's memory, or the promised part of a shared card. `shared`:
    companions had whole cards with it."""
    if allocation.gpu_share_milli == WHOLE_GPU and not shared:
        return allocation.card.memory_mib if allocation.gpus else 0
    return 0 if estimate is None else estimate.gpu_memory_mib


def _ended(state: State, at: At, live: LiveJob, fact: ledger_events.JobEnded) -> None:
    del state.live[fact.job_id]
    teaches = fact.outcome == "succeeded" and state.learning and not live.partly
    if teaches and live.exits and live.allocation is not None:
        _succeeded(state, at, live, live.allocation)
    _over(state, live)
    state.stepped.pop(fact.job_id, None)


def _succeeded(state: State, at: At, live: LiveJob, allocation: Allocation) -> None:
    job, workers = live.job, len(live.workers)
    measured = live.earlier.with_peaks(whole_job(live.exits), workers, allocation.card)
    fields: dict[str, float] = {"total_gpus": allocation.gpus * max(1, workers)}
    steps, steps_rejected, eta, corrected = None, "", None, ""
    if live.progress is not None:
        steps, steps_rejected = steps_of(live.progress)
        fields["disturbed"] = float(int(live.progress.met(at.now_ms)))
        fields |= measured_steps(live.progress, steps)
    measured = measured._replace(**fields)
    if live.progress is not None:
        measured, corrected = live.earlier.whole(measured, live.progress, workers, job.spec.checkpoint)
        eta = live.progress.eta_at_half(at.now_ms)
    why = implausible(measured, allocation)
    if live.info.profiled:
        measured = measured._replace(run_ms=UNKNOWN, iterations=UNKNOWN)
    estimate, limit_mib = summary_of(job), _cap_mib(job, "worker")
    run = FinishedRun(
        at.seq, job.job_id, live.info, allocation, estimate, measured, why, steps, steps_rejected
    )
    _finish(state, run._replace(eta=eta, limit_mib=limit_mib, corrected=corrected))


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


def _over(state: State, live: LiveJob) -> None:
    """The latest attempt, if there was one, teaches no more."""
    if state.learning:
        disturbances.measured(state.live, state.interference, live)


def _node(state: State, at: At, fact: external_events.NodeJoined | external_events.NodeChanged) -> None:
    state.nodes.put(fact.node)


def _node_lost(state: State, at: At, fact: ledger_events.NodeLost) -> None:
    state.nodes.remove(fact.node_id)


def _started(state: State, at: At, live: LiveJob, fact: external_events.TaskStarted) -> None:
    if live.progress is not None:
        live.progress.start(fact.task_id, fact.started_ms, at.now_ms)


def _phase(state: State, at: At, live: LiveJob, fact: external_events.TaskPhaseChanged) -> None:
    if live.progress is not None:
        live.progress.task(fact.task_id).changed(fact.phase, fact.at_ms)


def _stepped(state: State, at: At, live: LiveJob, fact: external_events.StepsMeasured) -> None:
    progress = live.progress
    if progress is not None and fact.task_id in progress.tasks and progress.step(fact, at.now_ms):
        job_id = live.job.job_id
        state.stepped[job_id] = at.event_id or f"{job_id}-{at.seq}"


def _eta(state: State, at: At, live: LiveJob, fact: EtaEstimated) -> None:
    if live.progress is not None and live.progress.attempt == fact.attempt:
        left = Bounds(fact.left_ms.middle, fact.left_ms.low, fact.left_ms.high)
        live.progress.publish(Published(fact.at_ms, left, fact.done))


def _stages(state: State, at: At, live: LiveJob, fact: external_events.StagesMeasured) -> None:
    if live.allocation is None or fact.task_id not in live.workers or not state.learning:
        return
    gpus, share_milli = live.allocation.gpus * len(live.workers), live.allocation.gpu_share_milli
    began_ms = at.now_ms - math.ceil(sum(sample.lasted_ms for sample in fact.samples))
    disturbed = live.disturbed_since(began_ms)
    row = state.stages.measured(live.info, gpus, share_milli, fact, at.event_id, at.seq, disturbed=disturbed)
    if row is not None:
        state.stage_rows.append(row)


def _stages_published(state: State, at: At, fact: StagesProfiled) -> None:
    if state.learning and (row := state.stages.published(fact, at.seq)) is not None:
        state.stage_rows.append(row)


def whole_job(exits: list[Run]) -> Run:
    """One run from its workers' exits (at least one): the largest of each field, the mean of utilisation."""
    if len(exits) == 1:
        return exits[0]
    columns = [[value for value in column if value == value] for column in zip(*exits, strict=True)]
    largest = Run(*(max(column) if column else UNKNOWN for column in columns))
    utilisation = columns[Run._fields.index("gpu_utilisation_percent")]
    if not utilisation:
        return largest
    return largest._replace(gpu_utilisation_percent=sum(utilisation) / len(utilisation))


OfJob = Callable[[State, At, LiveJob, Any], None]
"""Sees a fact about a live job, after it was folded."""
PROGRESS: Mapping[type[Event], OfJob] = MappingProxyType(
    {
        external_events.TaskStarted: _started,
        external_events.TaskPhaseChanged: _phase,
        external_events.StepsMeasured: _stepped,
        EtaEstimated: _eta,
    }
)
"""Of facts that change the progress of a job alone."""
HANDLERS: Mapping[type[Event], OfJob] = MappingProxyType(
    {
        **PROGRESS,
        external_events.StagesMeasured: _stages,
        external_events.CheckpointFetched: _fetched,
        external_events.TaskExited: _exited,
        ledger_events.TaskLost: _lost,
        external_events.OrderRefused: _lost,
        ledger_events.PlacementDecided: _placed,
        ledger_events.JobRequeued: _requeued,
        ledger_events.JobEnded: _ended,
        CoresDecided: _adjusted,
        BandwidthDecided: _adjusted,
    }
)
OF_TASKS = frozenset(kind for kind in HANDLERS if "job_id" not in kind.__struct_fields__)
"""Facts that name the task of a job; the others name the job."""
OF_CELL: Mapping[type[Event], Callable[[State, At, Any], None]] = MappingProxyType(
    {
        external_events.JobSubmitted: _submitted,
        external_events.NodeJoined: _node,
        external_events.NodeChanged: _node,
        ledger_events.NodeLost: _node_lost,
        StagesProfiled: _stages_published,
    }
)
"""Likewise, about no live job."""
