"""Mutants of groups: GPUs that strangers get, members that hold too much or too little, keepers that are
restarted."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace as replaced

from penstock.ledger.derived import groups
from penstock.ledger.fold import evolve_groups, evolve_sharing, evolve_tasks
from penstock.ledger.fold.evolve import HANDLERS
from penstock.ledger.replica import snapshot
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import GroupDecided
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.proposals import validate_plans
from penstock.scheduling.groups import validate_groups
from penstock_services.node_reporter.core import gpu_shares
from penstock_services.placer.core.common import stop
from penstock_services.placer.core.plans import proposals
from tests.faults.laboratory.patching import mutant, posing, replace

FAULTS = "group,late,cancel,gpu"
CELL = {"jobs": 24, "nodes": 3}


@mutant("each member of a group is booked with all of its place", faults=FAULTS, **CELL, first=1)
def _() -> None:
    replace(groups.own_part, lambda place, beside: place)


@mutant("a member's end frees what the others still hold", faults=FAULTS, **CELL, first=8)
def _() -> None:
    vars(evolve_tasks)["booked"] = lambda state, job, place: place


@mutant("the memory of a group is that of its largest member", faults=FAULTS, **CELL, first=1)
def _() -> None:
    real = groups.own_part

    def own_part(place: Any, beside: Any) -> Any:
        found = real(place, beside)
        most_mib = max((other.host_memory_mib for other in beside), default=0)
        return replaced(found, host_memory_mib=max(0, place.host_memory_mib - most_mib))

    replace(real, own_part)


@mutant("nobody asks whether the memory of a GPU is enough for all members", faults=FAULTS, **CELL, first=2)
def _() -> None:
    replace(validate_groups._lacking, lambda node, need, held, shared: "")


@mutant("a job joins another one that runs elsewhere", faults=FAULTS, **CELL)
def _() -> None:
    replace(validate_groups._not_there, lambda running, nodes: None)
    replace(validate_groups._not_alike, lambda jobs, members: None)


@mutant("who runs on the same GPUs may be left out of a group", faults=FAULTS, **CELL, first=8)
def _() -> None:
    def decided(state: CellState, found: Any, unit: Any, reason: str, turns: Any = None) -> GroupDecided:
        own = real(state, found, unit, reason, turns)
        return replaced(own, group_id=f"group-{state.token}-anew", job_ids=own.job_ids[-2:])

    real = proposals._grouped
    replace(real, decided)


@mutant("who runs is restarted to join a group", faults=FAULTS, **CELL, first=1)
def _() -> None:
    real = proposals.start

    def start(state: CellState, *given: Any) -> Iterator[Any]:
        for fact in real(state, *given):
            yield fact
            if isinstance(fact, GroupDecided):
                for job in list(state.groups.get(fact.group_id, {}).values()):
                    yield from stop(state, job, "preempted")

    replace(real, start)


@mutant("a job whose attempt is over stays in its group", faults=FAULTS, **CELL, first=8)
def _() -> None:
    replace(evolve_groups.leave, lambda state, job: None)


@mutant("the last member is never alone again", faults=FAULTS, **CELL, first=8)
def _() -> None:
    def leave(state: CellState, job: Any) -> None:
        if job.sharing.group:
            del state.groups[job.sharing.group][job.job_id]
            job.sharing = replaced(job.sharing, group="")

    replace(evolve_groups.leave, leave)


@mutant("a placement forgets the group that it belongs to", faults=FAULTS, **CELL, first=2)
def _() -> None:
    real = HANDLERS[PlacementDecided]

    def placement_decided(state: CellState, fact: Any) -> None:
        real(state, replaced(fact, group=None))

    replace(real, placement_decided)


@mutant("a snapshot forgets who is in a group", faults=FAULTS, **CELL, first=8)
def _() -> None:
    real = snapshot._derive

    def _derive(state: CellState) -> None:
        real(state)
        state.groups.clear()

    replace(real, _derive)


@mutant("a member that shares GPUs counts as one that ran alone", faults=FAULTS, **CELL)
def _() -> None:
    replace(evolve_sharing.changed, lambda state, job, place: None)


@mutant(
    "a node starts anybody beside a member of a group",
    faults="group,late,false_report,reboot,ledger",
    **CELL,
    first=1,
)
def _() -> None:
    replace(
        gpu_shares.companions,
        lambda one, other: bool(one.order and one.order.companions) or bool(other.order),
    )


@mutant("a group that waits forgets who runs", faults="group,late,cancel,gpu", **CELL, first=31)
def _() -> None:
    real = proposals._waiting

    def waiting(*given: Any) -> Iterator[Any]:
        for unit in real(*given):
            alone = unit.proposed and replaced(unit.proposed, group=unit.proposed.group and ())
            yield replaced(unit, proposed=alone)

    replace(real, waiting)


@mutant("a group that waits starts before the stops are proven", faults=FAULTS, **CELL)
def _() -> None:
    real = validate_plans.Allocation.form

    def form(self: Any, members: Any, *, waits: bool, fit_then: bool = False) -> Any:
        with posing(self, "_now", self.then):
            return real(self, members, waits=waits, fit_then=fit_then)

    replace(real, form)
