"""Mutants of proposed plans: half a unit, copies that act, plans out of time, room that others get, windows
without an end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from penstock.cluster.view import ClusterView
from penstock.ledger.fold import plans
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.decisions.plans import PlanUnit
from penstock.proposals import plan_stops, validate_plans
from penstock.scheduling.make_room import succession
from penstock_services.batcher.core import batcher
from penstock_services.placer.core.plans import proposals, units
from penstock_services.placer.core.waiting import window
from tests.faults.laboratory.patching import mutant, nothing, posing, replace

FAULTS = "propose,cancel,crash,late"


@mutant("of a unit one job starts", faults=FAULTS, first=4)
def _() -> None:
    real = proposals.start
    replace(real, lambda state, placed, *given: real(state, placed[:1], *given))


@mutant("answers to proposals are forgotten", faults=FAULTS)
def _() -> None:
    replace(plans.proposal_answered, lambda state, fact: None)


@mutant("a plan is valid for ever", faults=FAULTS, first=6)
def _() -> None:
    real = validate_plans._wrong_as_a_whole

    def wrong(state: CellState, proposal: Any, *given: Any) -> Any:
        return real(state, msgspec.structs.replace(proposal, valid_until_ms=None), *given)

    replace(real, wrong)


@mutant("a unit that waits does not expire", faults=FAULTS, first=75)
def _() -> None:
    real = units._gangs

    def gangs(state: CellState, group: Sequence[PlanUnit]) -> Any:
        unit = group[0]
        assert unit.proposed is not None
        timeless = msgspec.structs.replace(unit.proposed, valid_until_ms=None)
        return real(state, [msgspec.structs.replace(unit, proposed=timeless), *group[1:]])

    replace(real, gangs)


@mutant("what is kept for a unit goes to who comes next", faults=FAULTS, first=17)
def _() -> None:
    replace(units.beside, lambda state, profile, choose: choose)


@mutant("a unit starts on other nodes than it names", faults=FAULTS, first=1)
def _() -> None:
    real = proposals.start

    def start(state: CellState, placed: Any, *given: Any) -> Iterator[Any]:
        for fact in real(state, placed, *given):
            if isinstance(fact, PlacementDecided) and len(state.nodes) > 1:
                tasks = fact.tasks
                other = next(name for name in state.nodes if name != tasks[0].node_id)
                moved = msgspec.structs.replace(tasks[0], node_id=other)
                fact = msgspec.structs.replace(fact, tasks=(moved, *tasks[1:]))
            yield fact

    replace(real, start)


@mutant("a window stays open when its time is over", faults="propose", first=7)
def _() -> None:
    nothing(window.over)


@mutant("a window opens beside another", faults="propose", first=1)
def _() -> None:
    real = window.arrived

    def arrived(state: CellState, *, regroups: bool) -> Iterator[Any]:
        with posing(state, "window_until_ms", 0):
            found = list(real(state, regroups=regroups))
        yield from found

    replace(real, arrived)


@mutant("a unit is ordered beside a stop, and nobody is told after whom", faults=FAULTS, first=2)
def _() -> None:
    real = proposals.start

    def start(state: CellState, placed: Any, *given: Any) -> Iterator[Any]:
        return real(state, [found._replace(after=()) for found in placed], *given)

    replace(real, start)


@mutant(
    "whom a plan names is stopped, whether anybody needs the place or not",
    faults=FAULTS,
    profile="muri-l",
    first=14,
)
def _() -> None:
    def needed(state: CellState, validated: Any, named: Any) -> dict[str, plan_stops.MakesWay]:
        by = next((unit.unit.jobs[0].job_id for unit in validated.units), "")
        return {name: plan_stops.MakesWay(job, by, "") for name, job in named.items() if by}

    replace(plan_stops._needed, needed)


@mutant("for the batcher no time passes while no record comes", profile="interleave", first=4)
def _() -> None:
    replace(batcher._at, lambda state, now_ms: nullcontext())


@mutant("for a plan a job is stopped that it does not name", faults=FAULTS, profile="muri-l", first=76)
def _() -> None:
    real = plan_stops._may_stop

    def may_stop(state: CellState, names: Any) -> Any:
        return real(state, [*names, *(job.job_id for job in state.holding.values())])

    replace(real, may_stop)


@mutant("what one unit gets after a stop the next one gets as well", faults=FAULTS, first=100)
def _() -> None:
    real = succession.Succession.place

    def give(self: Any, gangs: Any) -> Any:
        return real(succession.Succession(ClusterView(self._view.state)), gangs)

    replace(real, give)
