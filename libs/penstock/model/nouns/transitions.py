"""State machines of jobs, tasks and nodes: one table of legal transitions each, from which the docs' diagrams
are made.

The fold checks every transition against these tables (`transition`), so that an illegal one stops the service
with an error instead of corrupting the state.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar


class JobStatus(StrEnum):
    SUBMITTED = "submitted"  # waits for its estimate
    QUEUED = "queued"
    BACKOFF = "backoff"  # failed an attempt, waits before it queues again
    LAUNCHING = "launching"  # placed; not all of its tasks have started
    RUNNING = "running"
    STOPPING = "stopping"  # being stopped; its resources are held until every exit is proven
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT_QUEUED = "timed_out_queued"
    TIMED_OUT_RUNNING = "timed_out_running"
    UNSCHEDULABLE = "unschedulable"  # fits on no node of the cell even when empty


class TaskStatus(StrEnum):
    ASSIGNED = "assigned"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class NodeStatus(StrEnum):
    READY = "ready"  # Reported, in the words of LAW 5
    SUSPECT = "suspect"  # silent: no further task is placed there, none of its tasks is given up
    GONE = "gone"  # proven: its tasks are dead


_J, _T, _N = JobStatus, TaskStatus, NodeStatus
_ENDINGS = frozenset(
    {_J.SUCCEEDED, _J.FAILED, _J.CANCELLED, _J.TIMED_OUT_QUEUED, _J.TIMED_OUT_RUNNING, _J.UNSCHEDULABLE}
)
TERMINAL = _ENDINGS

JOB_TRANSITIONS = MappingProxyType(
    {
        _J.SUBMITTED: frozenset({_J.QUEUED, _J.CANCELLED, _J.TIMED_OUT_QUEUED}),
        _J.QUEUED: frozenset({_J.LAUNCHING, _J.CANCELLED, _J.TIMED_OUT_QUEUED, _J.UNSCHEDULABLE}),
        _J.BACKOFF: frozenset({_J.QUEUED, _J.CANCELLED, _J.TIMED_OUT_QUEUED}),
        # A job that holds resources ends by its own exit, or through STOPPING: never directly by a cancel or
        # timer.
        # Out of memory under a guessed limit, it waits for another estimate.
        _J.LAUNCHING: frozenset(
            {_J.RUNNING, _J.STOPPING, _J.SUBMITTED, _J.QUEUED, _J.BACKOFF, _J.SUCCEEDED, _J.FAILED}
        ),
        _J.RUNNING: frozenset({_J.STOPPING, _J.SUBMITTED, _J.QUEUED, _J.BACKOFF, _J.SUCCEEDED, _J.FAILED}),
        _J.STOPPING: frozenset({_J.SUBMITTED, _J.QUEUED, _J.BACKOFF, *_ENDINGS - {_J.UNSCHEDULABLE}}),
        **{ending: frozenset[JobStatus]() for ending in JobStatus if ending in _ENDINGS},
    }
)
TASK_TRANSITIONS = MappingProxyType(
    {
        _T.ASSIGNED: frozenset({_T.RUNNING, _T.STOPPING, _T.EXITED}),
        _T.RUNNING: frozenset({_T.STOPPING, _T.EXITED}),
        _T.STOPPING: frozenset({_T.EXITED}),
        _T.EXITED: frozenset[TaskStatus](),
    }
)
NODE_TRANSITIONS = MappingProxyType(
    {
        _N.READY: frozenset({_N.SUSPECT, _N.GONE}),
        _N.SUSPECT: frozenset({_N.READY, _N.GONE}),
        _N.GONE: frozenset({_N.READY}),
    }
)

Status = TypeVar("Status", JobStatus, TaskStatus, NodeStatus)


class IllegalTransition(Exception):
    """A transition that is not in the table of its state machine."""


def transition(
    table: "MappingProxyType[Status, frozenset[Status]]", old: Status, new: Status, who: str
) -> Status:
    """Returns `new` if the table allows it. Raises `IllegalTransition` with the subject and both states."""
    if new not in table[old]:
        allowed = ", ".join(sorted(table[old])) or "nothing: it has ended"
        raise IllegalTransition(f"{who}: {old} may not become {new}; it may become {allowed}")
    return new
