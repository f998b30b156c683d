"""Decisions of one line that several choosers take."""

from typing import Any

from penstock.cluster.trusted import trusted
from penstock.events import facts
from penstock.events.facts import TimerSubject
from penstock.ledger.evolve import timer_id
from penstock.ledger.state import CellState, JobState


def timer(state: CellState, subject: str, kind: Any, after_ms: int, attempt: int = 0) -> facts.TimerSet:
    """A timer about `subject`, `after_ms` from the ledger's now."""
    return trusted(
        facts.TimerSet,
        timer_id=timer_id(subject, kind),
        at_ms=state.now_ms + after_ms,
        about=trusted(TimerSubject, kind=kind, id=subject, attempt=attempt),
    )


def stop(job: JobState, reason: Any) -> facts.StopDecided:
    """The job's own grace between SIGTERM and SIGKILL."""
    return trusted(
        facts.StopDecided,
        job_id=job.job_id,
        attempt=job.attempt,
        reason=reason,
        grace_ms=job.spec.grace_ms,
    )


def succeeded(job: JobState) -> facts.JobEnded:
    """Every worker has exited 0, and nothing of the job runs any more."""
    return trusted(facts.JobEnded, job_id=job.job_id, outcome="succeeded", exit_code=0, reason="")
