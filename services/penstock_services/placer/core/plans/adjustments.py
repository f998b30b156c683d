"""Adjustments of running tasks: the cores that a proposal gets, the changes of memory bandwidth that are
decided, and the end of what is temporary.

A service's throttles and probes are temporary (LAW 7): the placer gives back what was taken once
`ADJUSTED_FOR_MS` have passed since the job's latest one, so that nothing rests on the service that made them.
One that lives renews its throttles while they are needed.
"""

from collections.abc import Iterator
from typing import Any

from penstock.ledger.state.job.adjusted import Adjustment
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.adjustments import (
    ADJUSTED_FOR_MS,
    RENEWED_AFTER_MS,
    BandwidthDecided,
    CheckpointDecided,
    CoresDecided,
)
from penstock.model.decisions.ledger_events import TimerSet
from penstock.model.inputs.external_events import JobCheckpointRequested
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.proposals import CoresProposed
from penstock.model.schema.event import Event
from penstock.proposals.validate_adjustments import (
    Adjusting,
    Running,
    cause_of,
    cores_of,
    renews,
    running,
    usable_cores,
)
from penstock.scheduling.acting.guard import set_by_operator
from penstock_services.placer.core.common import continuation, timer


def decided(state: CellState, proposal: Adjusting) -> Iterator[CoresDecided | BandwidthDecided | TimerSet]:
    """For a proposal that `validate` has accepted on this state. Nothing where the task has it already, and
    its node has confirmed it; but the end of a search for cores with the present ones, and what renews an old
    throttle, are recorded, too."""
    found = running(state, proposal.task_id)
    assert isinstance(found, Running), found
    job, task, _ = found
    about: dict[str, Any] = {
        "job_id": job.job_id,
        "attempt": job.attempt,
        "task_id": proposal.task_id,
        "node_id": task.place.node_id,
        "by": proposal.by or proposal.proposer,
        "reason": proposal.reason,
        "cause": cause_of(proposal),
    }
    cores_too = isinstance(proposal, CoresProposed)
    latest = task.cores.adjusted if cores_too else task.bandwidth_adjusted
    renewed = (
        renews(found, proposal) and latest is not None and state.now_ms - latest.at_ms >= RENEWED_AFTER_MS
    )
    if isinstance(proposal, CoresProposed):
        cores = cores_of(state, found, proposal.cores)
        changed = set(cores) != set(task.used_cores) or cause_of(proposal) == "settled" or renewed
        if changed:
            yield CoresDecided(**about, cores=cores)
    else:
        changed = proposal.memory_bandwidth_percent != task.memory_bandwidth_percent or renewed
        if changed:
            yield BandwidthDecided(**about, memory_bandwidth_percent=proposal.memory_bandwidth_percent)
    if changed and _lasts(job):
        yield timer(state, job.job_id, "adjustment", ADJUSTED_FOR_MS, job.attempt)


def without_end(state: CellState, node_id: str) -> Iterator[TimerSet]:
    """A node has joined: what is temporary on it gets an end, where an older ledger, or one that has lost
    records, gave it none."""
    for job_id in dict.fromkeys(state.nodes[node_id].tasks.values()):
        job = state.jobs[job_id]
        if _lasts(job) and timer_id(job.job_id, "adjustment") not in state.timers:
            yield timer(state, job.job_id, "adjustment", ADJUSTED_FOR_MS, job.attempt)


def expired(state: CellState, job: JobState) -> Iterator[CoresDecided | BandwidthDecided | TimerSet]:
    """Gives back what services took from the job, as far as its nodes can now; the rest is tried again."""
    if job.status is not JobStatus.RUNNING:
        return
    freed = False
    for task_id, task in job.tasks.items():
        found = running(state, task_id)
        if not isinstance(found, Running):
            continue
        if _capped(task):
            about = _expires(job, task_id, task, task.bandwidth_adjusted)
            yield BandwidthDecided(**about, memory_bandwidth_percent=None)
        if (count := min(_own_cores(task), usable_cores(state, found))) != len(task.used_cores):
            about = _expires(job, task_id, task, task.cores.adjusted)
            decision = CoresDecided(**about, cores=cores_of(state, found, count))
            freed = freed or frees(state, decision)
            yield decision
    if freed:
        yield continuation(state)
    if _lasts(job):
        yield timer(state, job.job_id, "adjustment", ADJUSTED_FOR_MS, job.attempt)


def _expires(job: JobState, task_id: str, task: TaskState, latest: Adjustment | None) -> dict[str, Any]:
    by = latest.by if latest is not None else ""
    return {
        "job_id": job.job_id,
        "attempt": job.attempt,
        "task_id": task_id,
        "node_id": task.place.node_id,
        "by": by,
        "reason": f"{by or 'a service'} has not renewed it for {ADJUSTED_FOR_MS // 60_000} minutes",
        "cause": "released",
    }


def _lasts(job: JobState) -> bool:
    """Whether something of the job is adjusted for a time only."""
    return any(
        task.status is TaskStatus.RUNNING and (_capped(task) or _own_cores(task) != len(task.used_cores))
        for task in job.tasks.values()
    )


def _capped(task: TaskState) -> bool:
    """By a service."""
    return task.memory_bandwidth_percent is not None and not set_by_operator(task.bandwidth_adjusted)


def _own_cores(task: TaskState) -> int:
    """How many cores it has where no service takes some for a time, or lends it some."""
    used = len(task.used_cores)
    if task.cores.adjusted is None or set_by_operator(task.cores.adjusted):
        return used
    if task.cores.throttled_from:
        return max(used, task.cores.throttled_from)
    return used if task.cores.settled or not task.cores.placed else task.cores.placed


def asked_to_save(state: CellState, event: JobCheckpointRequested) -> Iterator[CheckpointDecided]:
    """For a running job: rank 0, which saves for its gang."""
    job = state.jobs[event.job_id]
    for task_id, task in job.tasks.items():
        if task.place.rank == 0 and task.status is TaskStatus.RUNNING:
            yield CheckpointDecided(
                job_id=job.job_id,
                attempt=job.attempt,
                task_id=task_id,
                node_id=task.place.node_id,
                by=event.by,
                reason=event.reason,
            )


def frees(state: CellState, decision: Event) -> bool:
    """Whether a decision that is not folded yet frees capacity for others."""
    if not isinstance(decision, CoresDecided) or decision.cause == "probe":
        return False
    return len(decision.cores) < len(state.jobs[decision.job_id].tasks[decision.task_id].place.cores)
