"""Reports that every task of a gang sends, as a training script does: phases and checkpoints."""

from collections.abc import Iterator
from math import ceil

from penstock.ledger.state.job.job_state import JobState
from penstock.model.inputs.external_events import TaskCheckpointed, TaskPhaseChanged
from penstock.simulator.job_models.model import Checkpoint, PhaseChange


def phase_reports(job: JobState, change: PhaseChange) -> Iterator[TaskPhaseChanged]:
    """The phase of each task, one event after the other: the job may change in between."""
    for task_id, task in list(job.tasks.items()):
        yield TaskPhaseChanged(
            node_id=task.place.node_id,
            task_id=task_id,
            token=job.token,
            phase=change.phase,
            at_ms=ceil(change.at_s * 1_000),
        )


def checkpoint_reports(job: JobState, checkpoint: Checkpoint) -> Iterator[TaskCheckpointed]:
    """The checkpoint of each task, one event after the other: the job may change in between."""
    for task_id, task in list(job.tasks.items()):
        yield TaskCheckpointed(
            node_id=task.place.node_id, task_id=task_id, token=job.token, at_ms=ceil(checkpoint.at_s * 1_000)
        )
