"""Retries of jobs: a gang whose tasks exit or are lost succeeds, fails, is retried, or queues again."""

from collections.abc import Iterator
from typing import Any

from penstock.cluster.capacity import never_fits
from penstock.ledger.derived.memory import raisable
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.schema.event import Event
from penstock_services.placer.core.common import Explain, stop, succeeded, timer
from penstock_services.placer.core.plans import moves

LOST = frozenset({"node_lost", "lost", "refused"})
"""First causes that are not the job's fault; nor is `stopped` without a decision to stop: its node was
drained."""
# attempts lost to nodes or refusals, beyond the user's retries; further ones count as the job's failure
MAX_LOSSES = 10
REFUSED_BACKOFF_MS = 1_000  # a node that refuses reports its changed inventory first


class Attempts:
    """The decisions at the end of an attempt.

    `replans`: the profile tries no head of the queue, so a job that no longer fits is detected when it queues
    again. `grace_ms`: a job that fits on no node ends after so long. `explain`: receives the explanations of
    moved jobs' placements.
    """

    def __init__(self, *, replans: bool, grace_ms: int, explain: Explain) -> None:
        self._explain = explain
        self._replans = replans
        self._grace_ms = grace_ms

    def after_exit(self, state: CellState, job: JobState) -> Iterator[Event]:
        """One or more tasks of the job have ended: decides about the gang."""
        living, failed, completed = False, False, True
        for task in job.tasks.values():
            exited = task.status is TaskStatus.EXITED
            living |= not exited
            failed |= exited and not task.exit.succeeded
            completed &= task.exit.succeeded or task.place.role != "worker"
        if job.status is JobStatus.STOPPING:
            if not living:
                yield from self._stopped(state, job)
        elif failed:
            if living:
                yield from stop(state, job, "gang_member_failed")
            else:
                yield from self._failed(state, job)
        elif completed:
            if living:
                yield from stop(state, job, "completed")
            else:
                yield succeeded(job)

    def lose(self, state: CellState, node: NodeState, task_id: str, reason: str) -> Iterator[Event]:
        """The task is proven dead without an exit of its own."""
        job = state.jobs[node.tasks[task_id]]
        yield ledger_events.TaskLost(task_id=task_id, node_id=node.spec.node_id, reason=reason)
        yield from self.after_exit(state, job)

    def accept_loss(
        self, state: CellState, node: NodeState, reason: str = "its node left"
    ) -> Iterator[Event]:
        """The node is proven gone, and every task on it dead."""
        for task_id in list(node.tasks):
            yield from self.lose(state, node, task_id, reason)
        yield ledger_events.NodeLost(node_id=node.spec.node_id)

    def _stopped(self, state: CellState, job: JobState) -> Iterator[Event]:
        """Every task of a stopped gang is proven dead."""
        match job.stop.reason:
            case "cancelled":
                yield ledger_events.JobEnded(
                    job_id=job.job_id, outcome="cancelled", reason=job.stop.detail or "stopped on request"
                )
            case "run_timeout":
                yield ledger_events.JobEnded(
                    job_id=job.job_id, outcome="timed_out_running", reason="ran longer than run_timeout"
                )
            case "queue_timeout":
                yield ledger_events.JobEnded(
                    job_id=job.job_id,
                    outcome="timed_out_queued",
                    reason="waited longer than queue_timeout, for a node that did not answer",
                )
            case "completed":
                yield succeeded(job)
            case "preempted" | "migrated" | "drained" | "predecessor_late" as reason:
                if all(task.exit.succeeded for task in job.tasks.values() if task.place.role == "worker"):
                    # It had finished before the stop reached it; a script that exits 0 on SIGTERM has not
                    # succeeded.
                    yield succeeded(job)
                    return
                if job.target:
                    yield from moves.arrive(state, job, self._explain)
                if job.status is JobStatus.STOPPING:
                    yield from self.queue_again(state, job, reason)
            case _:
                yield from self._failed(state, job)

    def _failed(self, state: CellState, job: JobState) -> Iterator[Event]:
        """The attempt failed and holds no resources any more: retry now, later, or end."""
        cause = job.exit.cause
        if cause == "stopped":
            yield from self.queue_again(state, job, "drained")
            return
        if cause in LOST and job.retries.losses < MAX_LOSSES:
            if cause == "refused":
                yield self._requeue(state, job, "refused", REFUSED_BACKOFF_MS)
                yield timer(state, job.job_id, "backoff", REFUSED_BACKOFF_MS, job.attempt)
            else:
                yield from self.queue_again(state, job, "node_lost")
            return
        if raisable(state, job):
            yield ledger_events.JobRequeued(
                job_id=job.job_id, attempt=job.attempt, reason="failed", estimate_again=True
            )
            yield from self.queue_timeout(state, job)
            return
        retry = job.spec.retry
        used = job.attempt - job.retries.infrastructure
        if used >= retry.max_attempts:
            code = job.exit.code if job.exit.code is None or 0 <= job.exit.code <= 255 else 255
            yield ledger_events.JobEnded(
                job_id=job.job_id, outcome="failed", exit_code=code, reason=job.exit.failure[:1_024]
            )
            return
        backoff_ms = min(retry.backoff_ms << min(used - 1, 40), retry.backoff_max_ms)
        yield self._requeue(state, job, "failed", backoff_ms)
        yield timer(state, job.job_id, "backoff", backoff_ms, job.attempt)

    @staticmethod
    def _requeue(state: CellState, job: JobState, reason: Any, wait_ms: int) -> Event:
        return ledger_events.JobRequeued(
            job_id=job.job_id, attempt=job.attempt, reason=reason, not_before_ms=state.now_ms + wait_ms
        )

    def queue_again(self, state: CellState, job: JobState, reason: Any) -> Iterator[Event]:
        """At its old place in the queue. Meanwhile the cell may have become too small for it."""
        yield ledger_events.JobRequeued(
            job_id=job.job_id,
            attempt=job.attempt,
            reason=reason,
            not_before_ms=None,
        )
        yield from self.queue_timeout(state, job)
        if self._replans and job.held is None and (why := never_fits(state, job.demand)) is not None:
            yield from self.park(state, job, why)

    def park(self, state: CellState, job: JobState, reason: str) -> Iterator[Event]:
        """It would not fit even the empty cell: no job waits behind it, and it ends unless a suitable node
        joins in time."""
        yield ledger_events.JobFoundUnschedulable(job_id=job.job_id, reason=reason[:MAX_TEXT])
        yield timer(state, job.job_id, "unschedulable", self._grace_ms)

    @staticmethod
    def run_timeout(state: CellState, job: JobState | None) -> Iterator[Event]:
        """All tasks of the job may run: its run time-out begins."""
        if job is not None and job.status is JobStatus.RUNNING and job.spec.run_timeout_ms is not None:
            yield timer(state, job.job_id, "run_timeout", job.spec.run_timeout_ms, job.attempt)

    @staticmethod
    def waits_on(state: CellState, job: JobState) -> Iterator[Event]:
        """Some nodes have not answered the order to start it: the rest of its queue time-out runs."""
        if job.spec.queue_timeout_ms is not None and job.queued_ms is not None:
            left_ms = job.queued_ms + job.spec.queue_timeout_ms - state.now_ms
            yield timer(state, job.job_id, "queue_timeout", max(0, left_ms), job.attempt)

    @staticmethod
    def queue_timeout(state: CellState, job: JobState) -> Iterator[Event]:
        """A wait in the queue begins: each has the whole queue time-out, which does not run while the job is
        held."""
        waits = job.status in (JobStatus.SUBMITTED, JobStatus.QUEUED) and job.held is None
        if job.spec.queue_timeout_ms is not None and waits:
            yield timer(state, job.job_id, "queue_timeout", job.spec.queue_timeout_ms, job.attempt)
