"""Initialisation of the estimator's fold from a snapshot of the cell instead of the ledger's first record.

A snapshot has the placements of running jobs; their progress is recalled from the records before it. They
cannot be validated forwards, since the head of the chain there is unknown, but backwards: the snapshot's head
names the last valid one, which names the one before it (LAW 3).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.ledger.record.record import RawFact, Unreadable, read, record_id
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.model.inputs.estimates import EtaEstimated
from penstock.model.nouns.token import seq_of
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.schema.event import wire_type
from penstock_services.estimator.core.fold.earlier import Earlier
from penstock_services.estimator.core.fold.live import At, LiveJob
from penstock_services.estimator.core.fold.progress import Progress, begun
from penstock_services.estimator.core.fold.state import PROGRESS, State
from penstock_services.estimator.core.records.conditions import Conditions, Disturbance
from penstock_services.estimator.core.records.runs import job_info

MAX_RECALLED = 100_000  # records; about two seconds, and at a cell's busiest the last hour
TYPES = frozenset(wire_type(kind) for kind in PROGRESS)


def begin_at(state: State, replica: Replica) -> None:
    """Continues from a fold of the cell that another process has made (a snapshot); only before the first
    `fold`.

    Gangs of which some workers had exited teach nothing: a snapshot does not hold the use of those workers.
    """
    cell, state.replica = replica.state, replica
    for node in cell.nodes.values():
        state.nodes.put(node.spec, present=node.status is not NodeStatus.GONE)
    for job in cell.jobs.values():
        live = state.live[job.job_id] = LiveJob(job, job_info(job.spec), job.job_id)
        kept_ms = job.saving.kept_ms
        live.earlier = Earlier(ran=job.progress.served_ms > 0, kept_ms=kept_ms)  # disturbances are unknown
        if kept_ms:
            live.earlier.workers.add(job.workers)
        workers = [task for task in job.tasks.values() if task.place.role == "worker"]
        if workers:
            places = [task.place for task in workers]
            live.allocation = state.nodes.allocation_of(places)
            live.info = live.info_of_attempt(len(workers))
            live.progress = begun(job.attempt, job.placed_ms or 0, places, live.allocation.card.model)
            live.progress.started_ms = job.running_ms
            _conditions_of(job, workers, live.progress)
            live.partly = any(task.exit.at_ms is not None for task in workers)
            placed_seq = seq_of(job.token)
            state.recall_seq = min(state.recall_seq or placed_seq, placed_seq)


def _conditions_of(job: JobState, workers: Sequence[TaskState], found: Progress) -> None:
    """The run conditions of the present attempt."""
    changed = [
        one for task in workers for one in (task.cores.adjusted, task.bandwidth_adjusted) if one is not None
    ]
    found.placed = Conditions(cores=tuple(task.cores.placed for task in workers))
    found.usual = Conditions(
        cores=tuple(len(task.place.cores) if task.cores.settled else task.cores.placed for task in workers)
    )
    found.conditions = Conditions(job.sharing.jobs, tuple(len(task.used_cores) for task in workers))
    for worker, task in enumerate(workers):
        found.conditions = found.conditions.with_cap(worker, task.memory_bandwidth_percent)
    found.since_ms = max([found.since_ms, job.sharing.since_ms, *(one.at_ms for one in changed)])
    found.disturbed = found.conditions.apart(found.placed)
    if job.sharing.ever:
        found.disturbed |= Disturbance.SHARED
    if any(task.cores.adjusted is not None and task.cores.adjusted.by for task in workers):
        found.disturbed |= Disturbance.CORES
    if any(task.bandwidth_adjusted is not None and task.bandwidth_adjusted.by for task in workers):
        found.disturbed |= Disturbance.CAPPED


def recall_from(state: State, offset: int) -> int:
    """Offset from which on records before the snapshot, which ends at `offset`,
    hold the progress of running jobs."""
    if state.recall_seq is None:
        return offset
    oldest = state.recall_seq - 1  # a record's offset is at least its seq - 1: void ones stand between
    return min(max(oldest, offset - MAX_RECALLED, 0), offset)


def recall(state: State, values: Iterable[bytes]) -> None:
    """Folds the progress of the snapshot's running jobs from the records before it, in their order, void ones
    included; only between `begin_at` and the first `fold`. The cell's state stays: it holds these records."""
    records: list[tuple[str, str, At, list[RawFact]]] = []
    for value in values:
        try:
            record = read(value)
        except Unreadable:
            continue
        at = At(record.seq, record.now_ms, record.cause.event_id)
        facts = [fact for fact in record.facts if fact.type in TYPES]
        records.append((record_id(value), record.parent, at, facts))
    valid: list[tuple[At, list[RawFact]]] = []
    wanted = state.replica.head.id
    for own_id, parent, at, facts in reversed(records):
        if own_id == wanted:
            wanted = parent
            valid.append((at, facts))
    of_task = {task_id: live for live in state.live.values() for task_id in live.job.tasks}
    for at, facts in reversed(valid):
        for fact in facts:
            event: Any = fact.event()
            if (handler := PROGRESS.get(type(event))) is None:
                continue
            told = isinstance(event, EtaEstimated)
            live = state.live.get(event.job_id) if told else of_task.get(event.task_id)
            if live is not None:
                handler(state, at, live, event)
