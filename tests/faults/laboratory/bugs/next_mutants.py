"""Mutants of next members of leases: who starts or trains too early, and books that forget one of the two."""

from typing import Any

from penstock.ledger.derived import groups, succession
from penstock.ledger.fold import evolve_tasks
from penstock.scheduling.make_room import succession as policy
from penstock_services.node_reporter.core import gate, machine
from penstock_services.node_reporter.core.state import Put
from penstock_services.placer.core.waiting import prelaunching
from tests.faults.laboratory.machines.host import SimulatedLauncher
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
    "who follows a job follows its next attempt, too",
    faults="group,late,cancel,gpu,propose,crash",
    **CELL,
    first=1,
)
def _() -> None:
    replace(succession.comes_after, lambda one, other: other.job_id in one.succession.after)


@mutant("a next member takes cores of anybody who is being stopped", faults=FAULTS, **CELL, first=4)
def _() -> None:
    real = policy.Succession._task

    def task(self: Any, node: Any, job: Any, rank: int, need: Any, before: Any, undos: Any) -> Any:
        there = self._left_on(node) if before else ()
        lent = [leaving for leaving in there if leaving not in [one for one, _ in before]]
        return real(self, node, job, rank, need, [*before, *((leaving, 0) for leaving in lent)], undos)

    replace(real, task)


@mutant("a next member comes after a job that runs on", faults=FAULTS, **CELL)
def _() -> None:
    real = policy._leaving

    def leaving(state: Any, node: Any, job: Any, task_id: str, *, ending: bool) -> Any:
        place = job.tasks[task_id].place
        found = real(state, node, job, task_id, ending=ending)
        return found or (
            policy._Leaving(job, 1 << place.gpus[0], 0) if place.gpus and not job.sharing.group else None
        )

    replace(real, leaving)


# ------------------------------------------------------------------------------------------------ before its
# GPUs are free

EARLY: dict[str, Any] = {"jobs": 24, "nodes": 3, "profile": "liquid"}
EARLY_FAULTS = "prelaunch,late,cancel"


@mutant("a gate opens though somebody else lives on the GPU", faults=EARLY_FAULTS, **EARLY)
def _() -> None:
    vars(gate)["fits"] = lambda others, task: True


@mutant("a task that launches early trains at once", faults=EARLY_FAULTS, **EARLY)
def _() -> None:
    real = SimulatedLauncher.spawn
    replace(real, lambda self, order, until_s, *, gated: real(self, order, until_s, gated=False))


@mutant(
    "a gate is opened once and not again after a crash",
    faults=f"{EARLY_FAULTS},crash,steps",
    **EARLY,
    first=20,
)
def _() -> None:
    replace(gate.open_again, lambda state: iter(()))


@mutant("who launches early waits for ever", faults=EARLY_FAULTS, **EARLY, first=113)
def _() -> None:
    replace(prelaunching.late, lambda state, job: iter(()))


@mutant("the start of who waits at its gate is reported", faults=EARLY_FAULTS, **EARLY)
def _() -> None:
    real = machine._spawned

    def spawned(state: Any, given: Any) -> Any:
        for decision in real(state, given):
            yield decision
            if isinstance(decision, Put) and decision.task.gated:
                yield machine._started(decision.task)

    replace(real, spawned)


@mutant("who is followed frees what its successor has, though nobody stops it", faults=EARLY_FAULTS, **EARLY)
def _() -> None:
    real = groups.booked

    def booked(state: Any, job: Any, place: Any, gone: Any = frozenset()) -> Any:
        known = job.succession
        return place if known.followed and not known.after else real(state, job, place, gone)

    replace(real, booked)
