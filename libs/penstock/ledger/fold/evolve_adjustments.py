"""Fold of adjustments: cores and memory bandwidth of running tasks, as decided and as their nodes answered.

Resources that a task gives up are free at once: the order to shrink it is in its node's partition before any
order that needs them, and a node carries out its orders in sequence (decision 63). A probe with fewer cores
gives up nothing (decision 99).
"""

from msgspec.structs import replace

from penstock.ledger.derived.groups import booked
from penstock.ledger.fold import evolve_arrays
from penstock.ledger.state.job.adjusted import Adjustment
from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import (
    AdjustmentDecided,
    BandwidthDecided,
    CheckpointDecided,
    CoresDecided,
    TaskAdjusted,
)


def cores_decided(state: CellState, fact: CoresDecided) -> None:
    node, task = state.nodes[fact.node_id], _task(state, fact)
    job = state.jobs[fact.job_id]
    _count_cores(job, task, fact)
    tried = fact.cause == "probe" and set(fact.cores) <= set(task.place.cores)
    trial = fact.cores if tried and len(fact.cores) < len(task.place.cores) else ()
    task.cores = replace(task.cores, adjusted=_decided(state, fact), trial=trial)
    job.version += 1
    state.change_log.add(job.job_id)
    if tried:
        return
    node.take_back_cores(booked(state, job, task.place).cores)
    task.place = replace(task.place, cores=fact.cores)
    node.take_cores(booked(state, job, task.place).cores)
    evolve_arrays.hold_cores(node, job, task.place.cores)
    state.rebook(node)


def _count_cores(job: JobState, task: TaskState, fact: CoresDecided) -> None:
    """Counters that bound a service's changes (`penstock.proposals.validate_adjustments`). Cores that an
    operator chose are not given back."""
    cores, before, after = task.cores, len(task.used_cores), len(fact.cores)
    if fact.cause == "contention":
        _throttled(job, after < before)
        task.cores = replace(cores, throttled_from=cores.throttled_from or before)
        return
    throttled = fact.cause == "released" and after < cores.throttled_from
    task.cores = replace(
        cores,
        probes=cores.probes + (fact.cause == "probe"),
        settled=cores.settled or fact.cause == "settled",
        throttled_from=cores.throttled_from if throttled else 0,
    )
    if fact.cause in ("", "released"):
        return
    changes = job.adjustments.core_changes + (after not in (before, cores.placed))
    job.adjustments = replace(job.adjustments, core_changes=changes)


def _throttled(job: JobState, times: int) -> None:
    job.adjustments = replace(job.adjustments, throttles=job.adjustments.throttles + times)


def bandwidth_decided(state: CellState, fact: BandwidthDecided) -> None:
    task = _task(state, fact)
    if fact.cause and fact.memory_bandwidth_percent not in (None, task.memory_bandwidth_percent):
        _throttled(state.jobs[fact.job_id], 1)
    task.memory_bandwidth_percent = fact.memory_bandwidth_percent
    task.bandwidth_adjusted = _decided(state, fact)
    state.jobs[fact.job_id].version += 1


def checkpoint_decided(state: CellState, fact: CheckpointDecided) -> None:
    """A program that saves to its own location sends no answer: it is asked once."""
    job = state.jobs[fact.job_id]
    if job.spec.checkpoint == "sdk":
        _task(state, fact).checkpoint_asked = _decided(state, fact)
    job.version += 1


def task_adjusted(state: CellState, fact: TaskAdjusted) -> None:
    """Stores the node's answer. The placer's guard has compared the tokens already."""
    job = state.jobs[state.nodes[fact.node_id].tasks[fact.task_id]]
    task = job.tasks[fact.task_id]
    answer = {"enforced": fact.enforced, "problem": "" if fact.enforced else fact.detail or "not reported"}
    if fact.what == "cores" and task.cores.adjusted is not None:
        task.cores = replace(task.cores, adjusted=replace(task.cores.adjusted, **answer))
    elif fact.what == "memory_bandwidth" and task.bandwidth_adjusted is not None:
        task.bandwidth_adjusted = replace(task.bandwidth_adjusted, **answer)
    job.version += 1


def ledger_lost(state: CellState) -> None:
    """The adjustments in the lost records are unknown: every living task gets again what this ledger
    allocates to it."""
    known = Adjustment(state.token, "", "the ledger has lost records", state.now_ms)
    for job in state.holding.values():
        for task in job.tasks.values():
            if task.place.cores:
                task.cores = replace(task.cores, adjusted=known)
            if state.nodes[task.place.node_id].spec.bandwidth_cap != "none":
                task.bandwidth_adjusted = known


def adjustment(task: TaskState, what: str) -> Adjustment | None:
    """The latest adjustment of this kind (`TaskAdjusted.what`)."""
    return task.cores.adjusted if what == "cores" else task.bandwidth_adjusted


def _task(state: CellState, fact: AdjustmentDecided) -> TaskState:
    return state.jobs[fact.job_id].tasks[fact.task_id]


def _decided(state: CellState, fact: AdjustmentDecided) -> Adjustment:
    return Adjustment(state.token, fact.by, fact.reason, state.now_ms)
