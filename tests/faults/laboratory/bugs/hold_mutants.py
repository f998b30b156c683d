"""Mutants of holds and releases."""

from typing import Any

from penstock.ledger.fold import evolve_holds, evolve_jobs
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock_services.placer.core import guard
from tests.faults.laboratory.patching import accepting, mutant, replace


@mutant("a hold is noted, and not obeyed", faults="hold")
def _() -> None:
    def job_held(state: CellState, fact: Any) -> None:
        state.jobs[fact.job_id].commanded_seq = state.seq

    replace(evolve_holds.job_held, job_held)


@mutant("a hold is over when the job waits again", faults="hold,crash,gpu,shim")
def _() -> None:
    real = evolve_jobs.set_job

    def set_job(state: CellState, job: Any, status: JobStatus) -> None:
        if status is JobStatus.QUEUED:
            job.held = None
        real(state, job, status)

    replace(real, set_job)


@mutant(
    "a queue time-out goes on while its job is held", faults="hold", storm_s=300.0, nodes=3, jobs=19, first=9
)
def _() -> None:
    real = evolve_holds.job_held

    def job_held(state: CellState, fact: Any) -> None:
        timers = dict(state.timers)
        real(state, fact)
        state.timers |= timers

    replace(real, job_held)


@mutant("a release is refused", faults="hold")
def _() -> None:
    replace(guard._release, lambda state, event: "held_by_operator")


@mutant("a released job is not in the queue", faults="hold")
def _() -> None:
    real = evolve_holds.job_released

    def job_released(state: CellState, fact: Any) -> None:
        real(state, fact)
        state.queue.pop(state.jobs[fact.job_id].order, None)

    replace(real, job_released)


@mutant("a command that was sent again is obeyed again", faults="hold,duplicate,twice", first=2)
def _() -> None:
    accepting(guard._command, "old_command")
