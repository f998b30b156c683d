"""Fold of job events: submissions, estimates, progress and decisions."""

from msgspec.structs import replace

from penstock.ledger.derived.gpu_shares import shared
from penstock.ledger.derived.groups import booked
from penstock.ledger.derived.memory import limit_mib, short_key
from penstock.ledger.derived.ports import give_ports
from penstock.ledger.derived.resuming import resumed
from penstock.ledger.derived.speed import left_is_known
from penstock.ledger.derived.succession import awaited
from penstock.ledger.fold import evidence, evolve_arrays, evolve_sharing
from penstock.ledger.fold.evolve_groups import join, leave
from penstock.ledger.fold.evolve_moves import end_move
from penstock.ledger.fold.plans import arrived
from penstock.ledger.state.job.adjusted import TaskCores
from penstock.ledger.state.job.ending import NO_EXIT, Stop
from penstock.ledger.state.job.following import Following
from penstock.ledger.state.job.job_state import HOLDING, JobState, TaskState
from penstock.ledger.state.job.progress import MAX_RUNS, Progress, Run
from penstock.ledger.state.job.remaining import begun_again, begun_at_0, remaining_of
from penstock.ledger.state.job.retries import Retries
from penstock.ledger.state.job.succession import NO_SUCCESSION, Succession
from penstock.ledger.state.state import MAX_EARLY_ESTIMATES, MAX_ENDED_REMEMBERED, CellState
from penstock.ledger.state.timers import compact_timers, drop_timers
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated
from penstock.model.inputs.followers import FOLLOWER_TIMER
from penstock.model.nouns.transitions import (
    JOB_TRANSITIONS,
    TASK_TRANSITIONS,
    JobStatus,
    NodeStatus,
    TaskStatus,
    transition,
)

ATTEMPT_TIMERS = (
    "run_timeout",
    "launch_timeout",
    "stop_timeout",
    "predecessor_timeout",
    "adjustment",
    "turns",
)
JOB_TIMERS = ("queue_timeout", "backoff", "unschedulable", FOLLOWER_TIMER, *ATTEMPT_TIMERS)
INFRASTRUCTURE = frozenset({"node_lost", "preempted", "migrated", "refused", "drained", "predecessor_late"})
LOSSES = frozenset({"node_lost", "refused"})


def set_job(state: CellState, job: JobState, status: JobStatus) -> None:
    old = job.status
    if status not in JOB_TRANSITIONS[old]:
        transition(JOB_TRANSITIONS, old, status, f"job {job.job_id} at seq {state.seq}")
    job.status = status
    job.version += 1
    state.change_log.add(job.job_id)
    if old is JobStatus.RUNNING and job.running_ms is not None:
        runs = (*job.progress.runs, Run(job.attempt, job.running_ms, state.now_ms))
        job.progress = replace(job.progress, runs=runs[-MAX_RUNS:])
    if old is JobStatus.QUEUED:
        state.queue.pop(job.order, None)
    if status is JobStatus.QUEUED:
        if job.held is None:
            state.queue[job.order] = job.job_id
        job.queued_ms = state.now_ms
    elif status is not JobStatus.STOPPING and state.planned:
        state.planned.pop(job.job_id, None)
    if status in HOLDING:
        state.holding[job.order] = job
    elif old in HOLDING:
        del state.holding[job.order]
    if status is JobStatus.STOPPING:
        state.stopping[job.order] = job
    elif old is JobStatus.STOPPING:
        del state.stopping[job.order]


def job_submitted(state: CellState, fact: external_events.JobSubmitted) -> None:
    job = JobState(fact.job_id, fact.spec, state.seq, state.now_ms)
    state.jobs[job.job_id] = job
    if fact.spec.tied_to is not None:
        job.following = Following(absent_ms=state.now_ms)
    state.prelaunching += fact.spec.prelaunch
    estimate = state.early_estimates.pop(job.job_id, None)
    if estimate is not None:
        job.estimate = shared(estimate, job.spec, state.settings)
        evolve_arrays.asked(state, job)
        set_job(state, job, JobStatus.QUEUED)
        arrived(state)


def job_estimated(state: CellState, fact: JobEstimated) -> None:
    job = state.jobs.get(fact.job_id)
    if job is None:
        state.early_estimates[fact.job_id] = fact.estimate
        if len(state.early_estimates) > MAX_EARLY_ESTIMATES:
            state.early_estimates.popitem(last=False)
        return
    job.estimate = shared(fact.estimate, job.spec, state.settings)
    job.estimated_attempt = fact.attempt
    evolve_arrays.asked(state, job)
    if job.status is JobStatus.BACKOFF:
        job.version += 1
    else:
        set_job(state, job, JobStatus.QUEUED)
        arrived(state)


def placement_decided(state: CellState, fact: ledger_events.PlacementDecided) -> None:
    job = state.jobs[fact.job_id]
    head = state.head_of_queue()
    if head is not None and head is not job and not job.target and fact.unit is None:
        head.backfill_count += 1
    end_move(state, job, "")
    set_job(state, job, JobStatus.LAUNCHING)
    job.attempt = fact.attempt
    job.token = state.token
    give_ports(state, job, fact.tasks)
    job.placed_ms = state.now_ms
    job.running_ms, job.exit = None, NO_EXIT
    job.backfill_count = job.plans_passed = 0
    if job.saving.unsaved is not None:
        job.saving = replace(job.saving, unsaved=None)
    _clear_unschedulable(state, job)
    drop_timers(state, job.job_id, "queue_timeout")
    if state.failed_choices.in_a_row:
        state.failed_choices = replace(state.failed_choices, in_a_row=0)
    job.tasks, job.succession = {}, NO_SUCCESSION
    if job.sharing.ever:
        job.sharing = replace(job.sharing, jobs=(), since_ms=0, ever=False)
    if fact.borrows:
        job.array = replace(job.array, borrows=True)
    if fact.after or fact.prelaunch:
        job.succession = Succession(fact.after, fact.prelaunch)
    for other_id in fact.after:
        other = state.jobs[other_id]
        if other.status is not JobStatus.STOPPING:
            other.succession = replace(other.succession, followed=True)
    if fact.group is not None:
        join(state, job, fact.group)
    for place in fact.tasks:
        node = state.nodes[place.node_id]
        lease_ms = state.settings.lease_ms if node.leases else 0
        cores = TaskCores(len(place.cores))
        job.tasks[place.task_id] = TaskState(place, lease_ms=lease_ms, cores=cores)
        node.give(booked(state, job, place))
        evolve_arrays.hold_cores(node, job, place.cores)
        node.tasks[place.task_id] = job.job_id
        node.named += 1
        state.rebook(node)
        if node.distrust is not None:
            evidence.placed(state, node, job.job_id, place.gpus)
        evolve_sharing.changed(state, job, place)
    if job.saving.kept_ms and job.spec.checkpoint == "sdk" and resumed(state, job) is None:
        begin_at_0(job)
    if job.spec.min_workers is not None:
        job.workers = sum(place.role == "worker" for place in fact.tasks)


def begin_at_0(job: JobState) -> None:
    """The attempt starts from zero: it does not find the checkpoint, or not the latest."""
    if job.progress.eta is not None:
        job.progress = replace(job.progress, eta=begun_at_0(job.progress.eta, job.saving.kept_ms))
    job.saving = replace(job.saving, kept_ms=0)


def stop_decided(state: CellState, fact: ledger_events.StopDecided) -> None:
    job = state.jobs[fact.job_id]
    if job.status is not JobStatus.STOPPING:
        set_job(state, job, JobStatus.STOPPING)
    if fact.reason != "migrated":
        end_move(state, job, f"it is stopped: {fact.reason}")
    if job.stop.reason != fact.reason:
        state.change_log.add(job.job_id)
    job.stop = Stop(fact.reason, fact.detail, state.token)
    if fact.reason == "predecessor_late":
        for other_id in awaited(state, job):
            other = state.jobs[other_id]
            other.succession = replace(other.succession, false_ends=other.succession.false_ends + 1)
    for task in job.tasks.values():
        if task.status in (TaskStatus.ASSIGNED, TaskStatus.RUNNING):
            task.status = transition(TASK_TRANSITIONS, task.status, TaskStatus.STOPPING, task.place.task_id)


def job_requeued(state: CellState, fact: ledger_events.JobRequeued) -> None:
    job = state.jobs[fact.job_id]
    _stands_still(state, job)
    if fact.reason in INFRASTRUCTURE or fact.estimate_again:
        job.retries = _retried(state, job, fact)
    if fact.reason != "migrated":
        end_move(state, job, f"it queues again: {fact.reason}")
    leave(state, job)
    evolve_arrays.attempt_over(state, job)
    _unname(state, job)
    job.tasks, job.succession = {}, Succession(false_ends=job.succession.false_ends)
    job.workers = job.spec.fewest_workers
    if job.array.borrows:
        job.array = replace(job.array, borrows=False)
    if job.stop.reason is not None:
        job.stop = replace(job.stop, reason=None)
    drop_timers(state, job.job_id, *ATTEMPT_TIMERS)
    if fact.estimate_again:
        job.estimate = None
        evolve_arrays.asked(state, job)
        set_job(state, job, JobStatus.SUBMITTED)
    else:
        set_job(state, job, JobStatus.QUEUED if fact.not_before_ms is None else JobStatus.BACKOFF)
    job.placed_ms = job.running_ms = None


def _retried(state: CellState, job: JobState, fact: ledger_events.JobRequeued) -> Retries:
    """The job's retries with the attempt that is over, while its tasks are still known."""
    before, short_of = job.retries, dict(job.retries.short_of)
    for task in job.tasks.values() if fact.estimate_again else ():
        if task.exit.exhausted:
            had_mib = limit_mib(state.nodes[task.place.node_id], task, task.exit.exhausted)
            key = short_key(task.place, task.exit.exhausted)
            short_of[key] = max(had_mib, short_of.get(key, 0))
    return replace(
        before,
        losses=before.losses + (fact.reason in LOSSES),
        infrastructure=before.infrastructure + 1,
        memory=before.memory + fact.estimate_again,
        short_of=short_of,
    )


def _stands_still(state: CellState, job: JobState) -> None:
    """The attempt is over: what it has served, what is kept of it, and what is left."""
    saved_ms, progress = _saved_ms(job), job.progress
    if job.running_ms is not None:
        progress = replace(progress, served_ms=progress.served_ms + state.now_ms - job.running_ms)
        if saved_ms is not None:
            kept_ms = job.saving.kept_ms + max(0, saved_ms - job.running_ms)
            job.saving = replace(job.saving, kept_ms=kept_ms)
    if progress.eta is not None:
        progress = replace(progress, eta=begun_again(progress.eta, job.running_ms, saved_ms, state.now_ms))
    job.progress = progress


def _saved_ms(job: JobState) -> int | None:
    """When the attempt last saved a checkpoint from which the next one can resume; None: it did not."""
    found = job.saving.checkpoint
    if found is None or job.spec.checkpoint == "none" or found.attempt != job.attempt:
        return None
    return found.at_ms


def _unname(state: CellState, job: JobState) -> None:
    """The attempt is over: its tasks no longer name their nodes."""
    for task in job.tasks.values():
        node = state.nodes[task.place.node_id]
        node.named -= 1
        if not node.named and node.status is NodeStatus.GONE:
            state.relist(node)


def job_queued(state: CellState, fact: ledger_events.JobQueued) -> None:
    set_job(state, state.jobs[fact.job_id], JobStatus.QUEUED)


def work_progressed(state: CellState, fact: external_events.WorkProgressed) -> None:
    """Stores reported progress. Jobs that have ended meanwhile are skipped."""
    jobs, now_ms = state.jobs, state.now_ms
    held: list[str] = []
    for progress in fact.jobs:
        job = jobs.get(progress.job_id)
        if job is not None:
            before = job.progress
            job.progress = Progress(
                progress.attained_s,
                progress.remaining_s,
                now_ms,
                job.attempt,
                before.eta if progress.remaining_s is None else None,
                before.served_ms,
                before.runs,
            )
            left_is_known(job, now_ms)
            if job.status in HOLDING:
                held.append(progress.job_id)
            else:
                state.change_log.add(progress.job_id)
    state.progress_log.extend(held)


def eta_estimated(state: CellState, fact: EtaEstimated) -> None:
    """Stores the estimate for a running attempt. What the job itself has reported in this attempt is more
    accurate and stays."""
    job = state.jobs.get(fact.job_id)
    if job is None or job.status not in HOLDING or job.attempt != fact.attempt:
        return
    if job.progress.remaining_s is not None and job.progress.attempt == job.attempt:
        return
    job.progress = replace(job.progress, remaining_s=None, eta=remaining_of(fact, state.now_ms))
    left_is_known(job, state.now_ms)
    state.progress_log.add(job.job_id)


def jobs_ranked(state: CellState, fact: ledger_events.JobsRanked) -> None:
    for rank in fact.ranks:
        job = state.jobs[rank.job_id]
        job.rank = rank_of(rank)
        state.change_log.add(job.job_id)


def rank_of(rank: ledger_events.JobRank) -> tuple[int, int, int]:
    """The rank as `JobState.rank`."""
    return rank.level, 0 if rank.chosen else 1, rank.position


def job_found_unschedulable(state: CellState, fact: ledger_events.JobFoundUnschedulable) -> None:
    """The job is taken out of the queue, so that no other job waits behind it."""
    job = state.jobs[fact.job_id]
    job.unschedulable = fact.reason
    state.unschedulable[job.job_id] = None
    evolve_arrays.asked(state, job)
    state.queue.pop(job.order, None)
    state.change_log.add(job.job_id)
    job.version += 1


def job_found_schedulable(state: CellState, fact: ledger_events.JobFoundSchedulable) -> None:
    job = state.jobs[fact.job_id]
    _clear_unschedulable(state, job)
    evolve_arrays.asked(state, job)
    state.queue[job.order] = job.job_id
    state.change_log.add(job.job_id)
    job.version += 1


def _clear_unschedulable(state: CellState, job: JobState) -> None:
    """Removes the finding and its timer; without a finding nothing changes."""
    job.unschedulable = ""
    if state.unschedulable.pop(job.job_id, "") is None:
        drop_timers(state, job.job_id, "unschedulable")


def job_ended(state: CellState, fact: ledger_events.JobEnded) -> None:
    job = state.jobs.pop(fact.job_id)
    state.prelaunching -= job.spec.prelaunch
    end_move(state, job, f"it has ended: {fact.outcome}")
    leave(state, job)
    evolve_arrays.attempt_over(state, job)
    evolve_arrays.asked(state, job)
    _unname(state, job)
    _clear_unschedulable(state, job)
    drop_timers(state, job.job_id, *JOB_TIMERS)
    compact_timers(state)
    set_job(state, job, JobStatus(fact.outcome))
    state.ended[fact.job_id] = fact.outcome
    if len(state.ended) > MAX_ENDED_REMEMBERED:
        state.ended.popitem(last=False)
