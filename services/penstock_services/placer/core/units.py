"""Carrying out units of proposed plans: all jobs of a unit start in one record, or none.

A unit whose nodes have room only when what is being stopped has ended waits, and nobody else gets anything of its nodes
(`PlanAdopted`). Whenever something happens those that fit by now start, in their order; one that would not fit any more even then
is given up, and its jobs go on waiting in the queue.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from penstock.ledger.job_state import JobState
from penstock.ledger.plans import kept_nodes, units_of_profile, units_of_proposals
from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.ledger_events import PlacementDecided
from penstock.model.plans import PlanAdopted, PlanUnit, UnitRef, Waiting
from penstock.model.proposals import ProposedUnit
from penstock.policies.base import Choose, LazyRng, Plan
from penstock.policies.overlay import Gangs, Placed, Room
from penstock.policies.preemption import Start, place_as_tried, set_of
from penstock.policies.trial import Trial
from penstock_services.placer.core.common import continuation, start_deadline
from penstock_services.placer.core.explaining import Explain, explained


def waiting(unit: ProposedUnit, ref: UnitRef, valid_until_ms: int | None) -> Iterator[PlanUnit]:
    """The unit as the ledger keeps it."""
    for number, job in enumerate(unit.jobs):
        why = "" if number else unit.explanation
        of = Waiting(of=ref, jobs=len(unit.jobs), explanation=why, valid_until_ms=valid_until_ms)
        yield PlanUnit(job_id=job.job_id, nodes=job.nodes, proposed=of)


def adopt(state: CellState, units: Sequence[PlanUnit]) -> Iterator[PlanAdopted]:
    """These take the place of all units of proposals that wait; what the profile keeps stays. Nothing where that changes nothing."""
    named = {unit.job_id for unit in units}
    found = (*units, *(unit for unit in units_of_profile(state) if unit.job_id not in named))
    if found != tuple(state.planned.values()):
        yield PlanAdopted(units=found)


def start(
    state: CellState,
    placed: Sequence[Placed],
    ref: UnitRef,
    why: str,
    explain: Explain,
    group_id: str | None = None,
) -> Iterator[Event]:
    """All jobs of one unit; the places were chosen on this state. `why`: as the proposer says. `group_id`: they share GPUs."""
    for found in placed:
        job, tasks = state.jobs[found.job.job_id], found.tasks
        explain(explained(state, job, tasks, ref.proposer, why))
        yield PlacementDecided(
            job_id=job.job_id, attempt=job.attempt + 1, tasks=tasks, unit=ref, group=group_id
        )
        yield start_deadline(state, job)


def carry_on(state: CellState, explain: Explain) -> Iterator[Event]:
    """Units that wait start, wait on or are given up. Nothing where none waits, or the cell is frozen."""
    if not state.planned or state.frozen:
        return
    units = units_of_proposals(state)
    if not units:
        return
    room = Room(state)
    left: list[PlanUnit] = []
    starting: list[tuple[Sequence[Placed], Waiting]] = []
    for _, found in groupby(units, lambda unit: unit.proposed and unit.proposed.of):
        group = list(found)
        gangs = _gangs(state, group)
        placed = "" if gangs is None else room.give(gangs)
        if isinstance(placed, str):
            continue
        left += group
        if placed is not None and (first := group[0].proposed) is not None:
            starting.append((placed, first))
    yield from adopt(state, left)
    for places, unit in starting:
        yield from start(state, places, unit.of, unit.explanation, explain)
    if room.full:
        yield continuation(state)


def _gangs(state: CellState, group: Sequence[PlanUnit]) -> Gangs | None:
    """The jobs of a unit and their nodes; None where it has expired, or one of its jobs does not wait in the queue any more."""
    first = group[0].proposed
    if first is None or len(group) < first.jobs:
        return None
    if first.valid_until_ms is not None and state.now_ms > first.valid_until_ms:
        return None
    gangs = [(state.jobs[unit.job_id], unit.nodes) for unit in group]
    return gangs if all(job.in_line for job, _ in gangs) else None


def beside(state: CellState, profile: str, choose: Choose) -> Choose:
    """As `choose`, where it takes nothing of the nodes of units that wait; else on other nodes, by first fit."""
    kept = kept_nodes(state)
    if not kept:
        return choose

    def chosen(state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        plan = choose(state, job, rng)
        if plan is None or kept.isdisjoint(plan.nodes):
            return plan
        avoid = set_of(state.nodes[node_id].ordinal for node_id in kept if node_id in state.nodes)
        fit = Trial(state).fit(job.demand, avoid)
        return None if fit is None else place_as_tried(profile, state, Start(job, fit))

    return chosen
