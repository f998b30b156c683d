"""Mutants of next members of leases: who starts too early, and books that forget one of the two."""

from typing import Any

from penstock.ledger import evolve_tasks, succession
from penstock.model.types import TaskPlacement
from penstock.policies import succession as policy
from tests.faults.laboratory.patching import mutant, replace

CELL: dict[str, Any] = {"jobs": 24, "nodes": 3, "profile": "srtf"}
FAULTS = "late,cancel"


@mutant("who starts after others is booked with all of its place", faults=FAULTS, **CELL)
def _() -> None:
    replace(succession.beyond, lambda place, beside: place)


@mutant("who ends frees what its successor has", faults=FAULTS, **CELL)
def _() -> None:
    vars(evolve_tasks)["booked"] = lambda state, job, place: place


@mutant(
    "who follows a job follows its next attempt, too", faults="group,late,cancel,gpu,propose,crash", **CELL
)
def _() -> None:
    replace(succession.comes_after, lambda one, other: other.job_id in one.after)


@mutant("a next member takes cores of anybody who is being stopped", faults=FAULTS, **CELL, first=9)
def _() -> None:
    real = policy._give

    def give(node: Any, job: Any, rank: int, need: Any, before: Any) -> TaskPlacement | None:
        lent = [leaving for leaving in node.leaving if before and leaving not in [one for one, _ in before]]
        return real(node, job, rank, need, [*before, *((leaving, 0) for leaving in lent)])

    replace(real, give)


@mutant("a next member comes after a job that runs on", faults=FAULTS, **CELL)
def _() -> None:
    real = policy._leaving

    def leaving(state: Any, node: Any, job: Any, task_id: str, *, ending: bool) -> Any:
        place = job.tasks[task_id].place
        found = real(state, node, job, task_id, ending=ending)
        return found or (
            policy._Leaving(job, 1 << place.gpus[0], 0) if place.gpus and not job.group else None
        )

    replace(real, leaving)
