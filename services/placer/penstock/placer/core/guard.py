"""Which inputs may change the state at all. A refused input still gets its record (`rejected`, LAW 2).

Messages may come twice, late, or for things that have ended: each guard compares with the job's state,
so that a duplicate cannot act twice (speed.md rule 10).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.cluster.moves import JobStatus, NodeStatus, TaskStatus
from penstock.cluster.nouns import MAX_JOB_ID_CHARS
from penstock.events import doors, facts
from penstock.events.base import Event
from penstock.ledger.evolve import job_of_task
from penstock.ledger.state import CellState, JobState

FINAL_STOPS = frozenset({"cancelled", "completed", "run_timeout"})


def refusal(state: CellState, event: Event) -> str | None:
    """Why this input must not be folded, or None. O(1)."""
    guard = GUARDS.get(event.TYPE)
    return guard(state, event) if guard is not None else None


def _submitted(state: CellState, event: doors.JobSubmitted) -> str | None:
    if len(event.job_id) > MAX_JOB_ID_CHARS:
        return "job_id_too_long"
    return "duplicate_job" if event.job_id in state.jobs or event.job_id in state.ended else None


def _estimated(state: CellState, event: doors.JobEstimated) -> str | None:
    if event.job_id in state.ended:
        return "job_ended"
    job = state.jobs.get(event.job_id)
    if job is None:
        return "duplicate_estimate" if event.job_id in state.early_estimates else None
    return None if job.status is JobStatus.SUBMITTED else "duplicate_estimate"


def _cancel(state: CellState, event: doors.JobCancelRequested) -> str | None:
    if event.job_id in state.ended:
        return "job_ended"
    job = state.jobs.get(event.job_id)
    if job is None:
        return "unknown_job"
    return "already_stopping" if job.stop_reason in FINAL_STOPS else None


def _of_living_task(state: CellState, event: "TaskEvent") -> str | None:
    job = job_of_task(state, event.node_id, event.task_id)
    if job is None:
        return "unknown_task"
    return None if event.token == job.token else "stale_token"


def _told(state: CellState, event: doors.EtaEstimated) -> str | None:
    """Remaining time is of one attempt: what comes after its end says nothing of the next."""
    if event.job_id in state.ended:
        return "job_ended"
    job = state.jobs.get(event.job_id)
    if job is None:
        return "unknown_job"
    return None if event.attempt == job.attempt else "stale_attempt"


def _started(state: CellState, event: doors.TaskStarted) -> str | None:
    reason = _of_living_task(state, event)
    if reason is None:
        job = job_of_task(state, event.node_id, event.task_id)
        if job is not None and job.tasks[event.task_id].started_ms is not None:
            return "duplicate_start"
    return reason


def _is_a_stop(job: JobState, token: int) -> bool:
    """Whether the token is of a stop of the current attempt; there may have been several."""
    return job.token < token <= job.stop_token


def _exited(state: CellState, event: doors.TaskExited) -> str | None:
    """A task whose stop overtook its start exits under the token of a stop: the only one its node knows."""
    job = job_of_task(state, event.node_id, event.task_id)
    if job is not None and _is_a_stop(job, event.token):
        return None
    return _of_living_task(state, event)


def _refused(state: CellState, event: doors.OrderRefused) -> str | None:
    job = job_of_task(state, event.node_id, event.task_id)
    if job is None:
        return "unknown_task"
    if event.token != job.token and not _is_a_stop(job, event.token):
        return "stale_token"
    task = job.tasks[event.task_id]
    return None if task.started_ms is None and task.status is not TaskStatus.EXITED else "already_started"


def _node(state: CellState, event: doors.NodeSuspected) -> str | None:
    return None if event.node_id in state.nodes else "unknown_node"


def _changed(state: CellState, event: doors.NodeChanged) -> str | None:
    node = state.nodes.get(event.node.node_id)
    if node is None:
        return "unknown_node"
    if node.spec.boot_id != event.node.boot_id:
        return "older_boot"
    return "node_gone" if node.status is NodeStatus.GONE else None


def _joined(state: CellState, event: doors.NodeJoined) -> str | None:
    """A copy that comes late would declare dead what the node has started since."""
    node = state.nodes.get(event.node.node_id)
    return "stale_join" if node is not None and 0 < event.incarnation <= node.incarnation else None


def _left(state: CellState, event: doors.NodeLeft) -> str | None:
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    if node.spec.boot_id != event.boot_id:
        return "older_boot"
    if 0 < event.incarnation < node.incarnation:
        return "stale_leave"
    if event.proof == "fenced":
        return "already_gone" if node.status is NodeStatus.GONE else None
    return "already_left" if node.leaving else None


def _gpu(state: CellState, event: doors.GpuFaulted) -> str | None:
    node = state.nodes.get(event.node_id)
    if node is None:
        return "unknown_node"
    return None if event.gpu < len(node.spec.gpus) else "unknown_gpu"


def _timer(state: CellState, event: facts.TimerFired) -> str | None:
    return None if event.timer_id in state.timers else "timer_gone"


TaskEvent = (
    doors.TaskStarted
    | doors.TaskExited
    | doors.TaskPhaseChanged
    | doors.TaskCheckpointed
    | doors.StepsMeasured
    | doors.StagesMeasured
)

GUARDS: Mapping[str, Callable[[CellState, Any], str | None]] = MappingProxyType(
    {
        doors.JobSubmitted.TYPE: _submitted,
        doors.JobEstimated.TYPE: _estimated,
        doors.JobCancelRequested.TYPE: _cancel,
        doors.TaskStarted.TYPE: _started,
        doors.TaskExited.TYPE: _exited,
        doors.TaskPhaseChanged.TYPE: _of_living_task,
        doors.TaskCheckpointed.TYPE: _of_living_task,
        doors.StepsMeasured.TYPE: _of_living_task,
        doors.StagesMeasured.TYPE: _of_living_task,
        doors.EtaEstimated.TYPE: _told,
        doors.OrderRefused.TYPE: _refused,
        doors.NodeJoined.TYPE: _joined,
        doors.NodeChanged.TYPE: _changed,
        doors.NodeSuspected.TYPE: _node,
        doors.NodeLeft.TYPE: _left,
        doors.GpuFaulted.TYPE: _gpu,
        facts.TimerFired.TYPE: _timer,
    }
)
