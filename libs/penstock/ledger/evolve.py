"""The one fold of the ledger: `evolve(state, fact)` is mechanical and makes no choices.

Every reader (placer, gateway, projector, simulator, replay) folds with this function; all of them
therefore agree. A fact that the tables of legal transitions forbid raises `IllegalTransition`: a bug to stop at.
"""

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from penstock.ledger import departed, evolve_holds, evolve_nodes, lease
from penstock.ledger.memory import failure_text, limit_mib, short_key
from penstock.ledger.record import RawRecord
from penstock.ledger.state import (
    HOLDING,
    MAX_EARLY_ESTIMATES,
    MAX_ENDED_REMEMBERED,
    CellState,
    FailedChoices,
    JobState,
    NodeState,
    TaskState,
    Timer,
)
from penstock.model import external_events, ledger_events
from penstock.model.estimates import JobEstimated
from penstock.model.event import Event
from penstock.model.topics import Topic
from penstock.model.transitions import (
    JOB_TRANSITIONS,
    TASK_TRANSITIONS,
    JobStatus,
    NodeStatus,
    TaskStatus,
    transition,
)

FOLD_VERSION = 20
"""Raised whenever a ledger folds to another state than before, so that nothing goes on from a snapshot of the former
meaning. Terms record it. `tests/replay/test_golden.py` fails where it was forgotten."""

JOB_TIMERS = ("queue_timeout", "run_timeout", "launch_timeout", "stop_timeout", "backoff", "unschedulable")
INFRASTRUCTURE = frozenset({"node_lost", "preempted", "migrated", "refused", "drained"})
MIN_TIMER_HEAP = 64  # entries below which nothing is gained by compacting
LOSSES = frozenset({"node_lost", "refused"})


Hook = Callable[[RawRecord, int, Event], None]
"""Called in place of `evolve` with the record, the fact's place in it and the fact. It calls `evolve` itself, so
that it sees the state before and after the fact."""


def fold(state: CellState, record: RawRecord, hook: Hook | None = None) -> None:
    """Folds one valid record: time, position, facts."""
    begin(state, record.seq, record.now_ms, record.term)
    cause = record.cause
    if cause.topic is not None:
        answered(state, cause.topic, cause.partition, cause.offset, cause.event_id or "")
    if hook is None:
        for raw in record.facts:
            evolve(state, raw.event())
        return
    for n, raw in enumerate(record.facts):
        hook(record, n, raw.event())


def begin(state: CellState, seq: int, now_ms: int, term: int) -> None:
    """A record begins: its seq is in the token of what it decides, its time the only clock.

    Nodes are forgotten here and nowhere else, so that none goes while a record is about it.
    """
    state.seq = seq
    state.now_ms = now_ms
    state.term = term
    if len(state.forgettable) > departed.MAX_GONE_NODES:
        departed.forget(state)


def answered(state: CellState, topic: str, partition: int, offset: int, event_id: str) -> None:
    """The record answers this input."""
    place = (topic, partition)
    state.positions[place] = offset + 1
    state.last_inputs[place] = event_id


def evolve(state: CellState, fact: Event) -> None:
    """Folds one fact. Facts without effect on the state (a model was trained) are ignored."""
    handler = HANDLERS.get(type(fact))
    if handler is not None:
        handler(state, fact)


# ------------------------------------------------------------------------------------------------ jobs


def timer_id(subject_id: str, kind: str) -> str:
    """One timer per subject and kind."""
    return f"{subject_id}:{kind}"


def _drop_timers(state: CellState, job_id: str, *kinds: str) -> None:
    """What a timer waited for has come: it will not fire."""
    timers = state.timers
    for kind in kinds:
        timers.pop(f"{job_id}:{kind}", None)


def _set_job(state: CellState, job: JobState, status: JobStatus) -> None:
    old = job.status
    if status not in JOB_TRANSITIONS[old]:
        transition(JOB_TRANSITIONS, old, status, f"job {job.job_id} at seq {state.seq}")
    job.status = status
    job.version += 1
    if old is JobStatus.QUEUED:
        state.queue.pop(job.order, None)
        state.change_log.add(job.job_id)
    if status is JobStatus.QUEUED:
        if job.held is None:
            state.queue[job.order] = job.job_id
        state.change_log.add(job.job_id)
        job.queued_ms = state.now_ms
    if status in HOLDING:
        state.holding[job.order] = job
    elif old in HOLDING:
        del state.holding[job.order]


def _job_submitted(state: CellState, fact: external_events.JobSubmitted) -> None:
    job = JobState(fact.job_id, fact.spec, state.seq, state.now_ms)
    state.jobs[job.job_id] = job
    estimate = state.early_estimates.pop(job.job_id, None)
    if estimate is not None:
        job.estimate = estimate
        _set_job(state, job, JobStatus.QUEUED)


def _job_estimated(state: CellState, fact: JobEstimated) -> None:
    job = state.jobs.get(fact.job_id)
    if job is None:
        state.early_estimates[fact.job_id] = fact.estimate
        if len(state.early_estimates) > MAX_EARLY_ESTIMATES:
            state.early_estimates.popitem(last=False)
        return
    job.estimate, job.estimated_attempt = fact.estimate, fact.attempt
    if job.status is JobStatus.BACKOFF:
        job.version += 1
    else:
        _set_job(state, job, JobStatus.QUEUED)


def _placement_decided(state: CellState, fact: ledger_events.PlacementDecided) -> None:
    job = state.jobs[fact.job_id]
    head = state.head_of_queue()
    if head is not None and head is not job:
        head.backfill_count += 1
    _set_job(state, job, JobStatus.LAUNCHING)
    job.attempt = fact.attempt
    job.token = state.token
    job.placed_ms = state.now_ms
    job.running_ms = job.stop_reason = job.exit_code = None
    job.failure = job.failure_cause = ""
    job.backfill_count = 0
    _clear_unschedulable(state, job)
    _drop_timers(state, job.job_id, "queue_timeout")
    if state.failed_choices.in_a_row:
        state.failed_choices = replace(state.failed_choices, in_a_row=0)
    job.tasks = {}
    for place in fact.tasks:
        node = state.nodes[place.node_id]
        lease_ms = state.settings.lease_ms if node.leases else 0
        job.tasks[place.task_id] = TaskState(place, lease_ms=lease_ms)
        node.give(place)
        node.tasks[place.task_id] = job.job_id
        node.named += 1
        state.rebook(node)


def _stop_decided(state: CellState, fact: ledger_events.StopDecided) -> None:
    job = state.jobs[fact.job_id]
    if job.status is not JobStatus.STOPPING:
        _set_job(state, job, JobStatus.STOPPING)
    job.stop_reason = fact.reason
    job.stop_token = state.token
    for task in job.tasks.values():
        if task.status in (TaskStatus.ASSIGNED, TaskStatus.RUNNING):
            task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.STOPPING, task.place.task_id)


def _job_requeued(state: CellState, fact: ledger_events.JobRequeued) -> None:
    job = state.jobs[fact.job_id]
    if job.running_ms is not None:
        job.served_ms += state.now_ms - job.running_ms
    if fact.estimate_again:
        for task in job.tasks.values():
            if task.exhausted:
                had_mib = limit_mib(state.nodes[task.place.node_id], task.place, task.exhausted)
                key = short_key(task.place, task.exhausted)
                job.short_of[key] = max(had_mib, job.short_of.get(key, 0))
    _unname(state, job)
    job.tasks = {}
    job.stop_reason = None
    _drop_timers(state, job.job_id, "run_timeout", "launch_timeout", "stop_timeout")
    job.placed_ms = job.running_ms = None
    if fact.reason in INFRASTRUCTURE or fact.estimate_again:
        job.infrastructure_retries += 1
        job.losses += fact.reason in LOSSES
        job.memory_retries += fact.estimate_again
    if fact.estimate_again:
        job.estimate = None
        _set_job(state, job, JobStatus.SUBMITTED)
    else:
        _set_job(state, job, JobStatus.QUEUED if fact.not_before_ms is None else JobStatus.BACKOFF)


def _unname(state: CellState, job: JobState) -> None:
    """The attempt is over, and its places with it."""
    for task in job.tasks.values():
        node = state.nodes[task.place.node_id]
        node.named -= 1
        if not node.named and node.status is NodeStatus.GONE:
            state.relist(node)


def _job_queued(state: CellState, fact: ledger_events.JobQueued) -> None:
    _set_job(state, state.jobs[fact.job_id], JobStatus.QUEUED)


def _work_progressed(state: CellState, fact: external_events.WorkProgressed) -> None:
    """Jobs that have ended meanwhile are passed over."""
    for progress in fact.jobs:
        job = state.jobs.get(progress.job_id)
        if job is not None:
            job.attained_s = progress.attained_s
            job.remaining_s = progress.remaining_s
            job.progress_ms = state.now_ms
            if job.status is JobStatus.QUEUED:
                state.change_log.add(job.job_id)


def _jobs_ranked(state: CellState, fact: ledger_events.JobsRanked) -> None:
    for rank in fact.ranks:
        job = state.jobs[rank.job_id]
        job.rank = (rank.level, 0 if rank.chosen else 1, rank.position)
        if job.status is JobStatus.QUEUED:
            state.change_log.add(job.job_id)


def _job_found_unschedulable(state: CellState, fact: ledger_events.JobFoundUnschedulable) -> None:
    """Such a job stands beside the queue: no other job waits behind it."""
    job = state.jobs[fact.job_id]
    job.unschedulable = fact.reason
    state.unschedulable[job.job_id] = None
    state.queue.pop(job.order, None)
    state.change_log.add(job.job_id)
    job.version += 1


def _job_found_schedulable(state: CellState, fact: ledger_events.JobFoundSchedulable) -> None:
    job = state.jobs[fact.job_id]
    _clear_unschedulable(state, job)
    state.queue[job.order] = job.job_id
    state.change_log.add(job.job_id)
    job.version += 1


def _clear_unschedulable(state: CellState, job: JobState) -> None:
    """The finding and its timer are gone; without a finding nothing changes."""
    job.unschedulable = ""
    if state.unschedulable.pop(job.job_id, "") is None:
        _drop_timers(state, job.job_id, "unschedulable")


def _job_ended(state: CellState, fact: ledger_events.JobEnded) -> None:
    job = state.jobs.pop(fact.job_id)
    _unname(state, job)
    _clear_unschedulable(state, job)
    _drop_timers(state, job.job_id, *JOB_TIMERS)
    _compact_timers(state)
    _set_job(state, job, JobStatus(fact.outcome))
    state.ended[fact.job_id] = fact.outcome
    if len(state.ended) > MAX_ENDED_REMEMBERED:
        state.ended.popitem(last=False)


# ----------------------------------------------------------------------------------------------- tasks


def job_of_task(state: CellState, node_id: str, task_id: str) -> JobState | None:
    """The job whose living task this is, if that task is on this node."""
    node = state.nodes.get(node_id)
    job_id = node.tasks.get(task_id) if node is not None else None
    return state.jobs.get(job_id) if job_id is not None else None


def _task_started(state: CellState, fact: external_events.TaskStarted) -> None:
    job = job_of_task(state, fact.node_id, fact.task_id)
    assert job is not None, fact.task_id
    task = job.tasks[fact.task_id]
    task.pid = fact.pid
    task.started_ms = state.now_ms
    if task.status is TaskStatus.ASSIGNED:
        task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.RUNNING, fact.task_id)
    if job.status is JobStatus.LAUNCHING and all(
        other.started_ms is not None for other in job.tasks.values()
    ):
        _set_job(state, job, JobStatus.RUNNING)
        job.running_ms = state.now_ms
        _drop_timers(state, job.job_id, "launch_timeout")
    job.version += 1


def _end_task(state: CellState, node_id: str, task_id: str, cause: str) -> tuple[JobState, TaskState]:
    """The task is proven dead: its resources are free."""
    node = state.nodes[node_id]
    job = state.jobs[node.tasks.pop(task_id)]
    task = job.tasks[task_id]
    task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.EXITED, task_id)
    task.exited_ms = state.now_ms
    task.cause = cause
    node.take_back(task.place)
    state.rebook(node)
    job.version += 1
    return job, task


def _task_exited(state: CellState, fact: external_events.TaskExited) -> None:
    node = state.nodes[fact.node_id]
    if fact.task_id not in node.tasks:
        node.orphan_tasks.pop(fact.task_id, None)
        return
    job, task = _end_task(state, fact.node_id, fact.task_id, fact.cause)
    task.succeeded = fact.cause == "exited" and fact.exit_code == 0
    task.exit_code = (
        fact.exit_code if fact.exit_code is not None else (128 + fact.signal if fact.signal else None)
    )
    task.exhausted = fact.exhausted
    first = not job.failure and job.stop_reason is None
    if fact.exhausted and (first or job.stop_reason in (None, "gang_member_failed")):
        _note_exhausted(node, job, task, fact)
        return
    if task.succeeded or not first:
        return
    job.exit_code = task.exit_code
    how = fact.cause.replace("_", " ")
    if fact.cause == "exited":
        how = f"exit code {fact.exit_code}" if fact.signal is None else f"killed by signal {fact.signal}"
    elif fact.cause == "stopped":
        how = "stopped by its node, which was drained"
    _note_failure(job, fact.node_id, task, f"{how}: {fact.detail}" if fact.detail else how)


def _note_exhausted(
    node: NodeState, job: JobState, task: TaskState, fact: external_events.TaskExited
) -> None:
    """Whichever member ran out of memory, it is why the others failed, though their exits may come first."""
    if any(other.exhausted for other in job.tasks.values() if other is not task):
        return
    job.exit_code = task.exit_code
    job.failure = failure_text(node, job, task, fact)
    job.failure_cause = task.cause


def _note_failure(job: JobState, node_id: str, task: TaskState, how: str) -> None:
    """The first failure decides what becomes of the gang; what it brings about in the others does not count."""
    if not job.failure and job.stop_reason is None:
        job.failure = f"{task.place.task_id} on {node_id}: {how}"
        job.failure_cause = task.cause


def _task_lost(state: CellState, fact: ledger_events.TaskLost) -> None:
    job, task = _end_task(state, fact.node_id, fact.task_id, "node_lost")
    _note_failure(job, fact.node_id, task, fact.reason)


def _order_refused(state: CellState, fact: external_events.OrderRefused) -> None:
    job, task = _end_task(state, fact.node_id, fact.task_id, "refused")
    _note_failure(job, fact.node_id, task, f"refused, {fact.reason}")
    node = state.nodes[fact.node_id]
    for uuid in fact.missing_gpus:
        evolve_nodes.mark_faulted(node, node.slot_of(uuid))
    if fact.missing_gpus:
        state.reindex(node)


# ------------------------------------------------------------------------------------- cell and timers


def _term_started(state: CellState, fact: ledger_events.TermStarted) -> None:
    state.term = fact.term
    state.settings = fact.settings


def _input_accepted(state: CellState, fact: ledger_events.InputAccepted) -> None:
    place = (fact.topic, fact.partition)
    state.positions[place] = fact.offset
    state.last_inputs[place] = ""
    if fact.topic == Topic.NODES:
        state.rejoin_offset = fact.end
        evolve_nodes.answers_lost(state)


def _ledger_accepted(state: CellState, fact: ledger_events.LedgerAccepted) -> None:
    state.epoch = fact.epoch
    state.rejoin_offset = fact.nodes_offset
    evolve_nodes.answers_lost(state)


def _cell_frozen(state: CellState, fact: ledger_events.CellFrozen) -> None:
    state.frozen = fact.reason


def _cell_thawed(state: CellState, fact: ledger_events.CellThawed) -> None:
    state.frozen = ""


def _choice_failed(state: CellState, fact: ledger_events.ChoiceFailed) -> None:
    before = state.failed_choices
    state.failed_choices = FailedChoices(
        before.count + 1,
        before.in_a_row + 1,
        state.seq,
        state.now_ms,
        fact.profile,
        fact.job_id,
        fact.error,
    )


def _timer_set(state: CellState, fact: ledger_events.TimerSet) -> None:
    state.timers[fact.timer_id] = Timer(fact.at_ms, fact.about)
    heapq.heappush(state.timer_heap, (fact.at_ms, fact.timer_id))
    _compact_timers(state)


def _compact_timers(state: CellState) -> None:
    """Entries of timers that are gone leave the heap before they are due, once they are most of it. Amortised O(log timers)."""
    if len(state.timer_heap) > MIN_TIMER_HEAP and len(state.timer_heap) > 2 * len(state.timers):
        state.timer_heap = [(timer.at_ms, timer_id) for timer_id, timer in state.timers.items()]
        heapq.heapify(state.timer_heap)


def _timer_gone(state: CellState, fact: ledger_events.TimerFired) -> None:
    state.timers.pop(fact.timer_id, None)


HANDLERS: Mapping[type[Event], Callable[[CellState, Any], None]] = MappingProxyType(
    {
        external_events.JobSubmitted: _job_submitted,
        JobEstimated: _job_estimated,
        ledger_events.PlacementDecided: _placement_decided,
        ledger_events.StopDecided: _stop_decided,
        ledger_events.JobRequeued: _job_requeued,
        ledger_events.JobQueued: _job_queued,
        ledger_events.JobFoundUnschedulable: _job_found_unschedulable,
        ledger_events.JobFoundSchedulable: _job_found_schedulable,
        ledger_events.JobEnded: _job_ended,
        external_events.JobHoldRequested: evolve_holds.job_held,
        external_events.JobReleaseRequested: evolve_holds.job_released,
        ledger_events.JobsRanked: _jobs_ranked,
        external_events.WorkProgressed: _work_progressed,
        external_events.TaskStarted: _task_started,
        external_events.TaskExited: _task_exited,
        ledger_events.TaskLost: _task_lost,
        external_events.OrderRefused: _order_refused,
        external_events.NodeJoined: evolve_nodes.node_joined,
        external_events.NodeChanged: evolve_nodes.node_changed,
        external_events.NodeSuspected: evolve_nodes.node_suspected,
        ledger_events.NodeProbed: lease.node_probed,
        external_events.ProbeSent: lease.probe_sent,
        ledger_events.ProbeExpired: lease.probe_expired,
        external_events.NodeCordoned: evolve_nodes.node_cordoned,
        external_events.NodeUncordoned: evolve_nodes.node_uncordoned,
        external_events.NodeLeft: evolve_nodes.node_left,
        ledger_events.NodeLost: evolve_nodes.node_lost,
        ledger_events.NodeRestored: evolve_nodes.node_restored,
        external_events.GpuFaulted: evolve_nodes.gpu_faulted,
        ledger_events.TermStarted: _term_started,
        ledger_events.InputAccepted: _input_accepted,
        ledger_events.LedgerAccepted: _ledger_accepted,
        ledger_events.CellFrozen: _cell_frozen,
        ledger_events.CellThawed: _cell_thawed,
        ledger_events.ChoiceFailed: _choice_failed,
        ledger_events.TimerSet: _timer_set,
        ledger_events.TimerFired: _timer_gone,
    }
)
