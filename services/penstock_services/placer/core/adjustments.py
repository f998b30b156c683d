"""Adjustments of running tasks: the cores that a proposal gets, and the changes of memory bandwidth that are decided."""

from collections.abc import Iterator
from typing import Any

from penstock.ledger.state import CellState
from penstock.model.adjustments import BandwidthDecided, CheckpointDecided, CoresDecided
from penstock.model.event import Event
from penstock.model.external_events import JobCheckpointRequested
from penstock.model.proposals import CoresProposed
from penstock.model.transitions import TaskStatus
from penstock.policies.validate_adjustments import Adjusting, Running, cause_of, cores_of, running


def decided(state: CellState, proposal: Adjusting) -> Iterator[CoresDecided | BandwidthDecided]:
    """For a proposal that `validate` has accepted on this state. Nothing where the task has it already, and its node has confirmed it; but the
    end of a search for cores with the present ones is recorded, too."""
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
    if isinstance(proposal, CoresProposed):
        cores = cores_of(state, found, proposal.cores)
        if set(cores) != set(task.used_cores) or cause_of(proposal) == "settled":
            yield CoresDecided(**about, cores=cores)
    elif proposal.memory_bandwidth_percent != task.memory_bandwidth_percent:
        yield BandwidthDecided(**about, memory_bandwidth_percent=proposal.memory_bandwidth_percent)


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
