"""Initialisation of the estimator's fold from a snapshot of the cell instead of the ledger's first record."""

from collections import OrderedDict

from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.model.nouns.token import seq_of
from penstock.model.nouns.transitions import NodeStatus, TaskStatus
from penstock_services.estimator.core.fold.earlier import Earlier, Saved
from penstock_services.estimator.core.fold.live import LiveJob, info_of_attempt, without_texts
from penstock_services.estimator.core.fold.progress import begun
from penstock_services.estimator.core.fold.state import State, tasks_of
from penstock_services.estimator.core.records.conditions import Conditions, Disturbance
from penstock_services.estimator.core.records.runs import estimate_summary, job_info


def begin_at(state: State, replica: Replica) -> None:
    """Continues from a fold of the cell that another process has made (a snapshot); only before the first
    `fold`.

    Gangs of which some workers had exited teach nothing: a snapshot does not hold the use of those workers.
    """
    cell, state.head = replica.state, replica.head
    state.jobs_offset = cell.positions.get((state.jobs_topic, state.jobs_partition), 0)
    for node in cell.nodes.values():
        state.nodes.put(node.spec, present=node.status is not NodeStatus.GONE)
    state.early = OrderedDict(
        (job_id, estimate_summary(found)) for job_id, found in cell.early_estimates.items()
    )
    for job in cell.jobs.values():
        estimate = job.estimate
        live = state.live[job.job_id] = LiveJob(
            job_info(job.spec),
            None if job.awaited_estimate is None else job.spec,
            job.job_id,
            None if estimate is None else estimate_summary(estimate),
            without_texts(job.spec),
            job.attempt + 1 if job.attempt else 0,
        )
        live.earlier = _earlier_of(job)
        workers = {t: task for t, task in job.tasks.items() if task.place.role == "worker"}
        if workers:
            places = [task.place for task in workers.values()]
            live.allocation = state.nodes.allocation_of(places)
            live.info = info_of_attempt(live, len(workers))
            live.workers = dict.fromkeys(workers)
            tasks_of(state, job.job_id, live, [task.place for task in job.tasks.values()])
            live.progress = begun(job.attempt, job.placed_ms or 0, places, live.allocation.card.model)
            live.progress.started_ms = job.running_ms
            _conditions_of(state, job, live)
            live.partly = any(task.exit.at_ms is not None for task in workers.values())
            placed_seq = seq_of(job.token)
            state.recall_seq = min(state.recall_seq or placed_seq, placed_seq)
            state.job_of_task.update(dict.fromkeys(workers, job.job_id))


def _earlier_of(job: JobState) -> Earlier:
    """State inherited from earlier attempts.
    A snapshot does not hold their disturbances: they count as undisturbed."""
    found, saved = Earlier(ran=job.progress.served_ms > 0, kept_ms=job.saving.kept_ms), job.saving.checkpoint
    if found.kept_ms:
        found.workers.add(job.workers)
    if saved is not None:
        found.saved = Saved(saved.at_ms, saved.node_id, saved.shared)
    return found


def _conditions_of(state: State, job: JobState, live: LiveJob) -> None:
    """The run conditions of the present attempt."""
    assert live.progress is not None
    workers = [task for task in job.tasks.values() if task.place.role == "worker"]
    living = [task.place for task in workers if task.status is not TaskStatus.EXITED]
    state.holders.take(job.job_id, living)
    changed = [
        one for task in workers for one in (task.cores.adjusted, task.bandwidth_adjusted) if one is not None
    ]
    found, caps = live.progress, [task.memory_bandwidth_percent for task in workers]
    found.placed = Conditions(cores=tuple(task.cores.placed for task in workers))
    found.usual = Conditions(
        cores=tuple(len(task.place.cores) if task.cores.settled else task.cores.placed for task in workers)
    )
    found.conditions = Conditions(job.sharing.jobs, tuple(len(task.used_cores) for task in workers))
    for worker, cap in enumerate(caps):
        found.conditions = found.conditions.with_cap(worker, cap)
    found.since_ms = max([found.since_ms, job.sharing.since_ms, *(one.at_ms for one in changed)])
    found.disturbed = found.conditions.apart(found.placed)
    if job.sharing.ever:
        found.disturbed |= Disturbance.SHARED
    if any(task.cores.adjusted is not None and task.cores.adjusted.by for task in workers):
        found.disturbed |= Disturbance.CORES
    if any(task.bandwidth_adjusted is not None and task.bandwidth_adjusted.by for task in workers):
        found.disturbed |= Disturbance.CAPPED
