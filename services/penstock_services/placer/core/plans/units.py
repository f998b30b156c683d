"""Execution of units of proposed plans: all jobs of a unit start in one record, or none.

A unit whose nodes are free only after running stops is ordered to start then, where its nodes can detect the
ends (`penstock.scheduling.make_room.succession`). Else it waits, and its nodes are reserved (`PlanAdopted`).
At each event units that fit by then start, in their order; a unit that would not fit even after all stops is
dropped, and its jobs go on waiting in the queue.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import Refusal
from penstock.cluster.view import ClusterView, Gangs, Placed
from penstock.ledger.fold.plans import reserved_nodes, units_of_proposals
from penstock.ledger.state.index import set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit, Waiting
from penstock.model.schema.event import Event
from penstock.proposals.validate_plans import Allocation, Waits
from penstock.scheduling.groups.validate_groups import Formed
from penstock.scheduling.make_room.preemption import Start, fit_of, place_as_tried
from penstock.scheduling.stages.protocols import Choose
from penstock_services.placer.core.common import Explain, continuation
from penstock_services.placer.core.plans.proposals import adopt, start
from penstock_services.placer.core.still_waiting import StillWaiting


def carry_on(
    state: CellState, explain: Explain, still: StillWaiting, *, made_way: bool = False
) -> Iterator[Event]:
    """Waiting units start, wait on or are dropped. Nothing where none waits, or the cell is frozen.

    `made_way`: the only event since the last call is the end of a task that counted as ended for them.
    """
    if not state.planned or state.frozen:
        return
    planned = units_of_proposals(state)
    if not planned:
        return
    units = [list(found) for _, found in groupby(planned, lambda unit: unit.proposed and unit.proposed.of)]
    unchanged = still.units(state, units)
    if len(unchanged) == len(units):
        return
    room = Allocation(state)
    left: list[PlanUnit] = []
    waits: list[list[PlanUnit]] = []
    starting: list[tuple[_Tried, Waiting]] = []
    for number, together in enumerate(units):
        if number in unchanged:
            room.reserve([node_id for unit in together for node_id in unit.nodes])
            left += together
            waits.append(together)
            continue
        unit = together[0].proposed
        gangs = _gangs(state, together)
        if unit is None or gangs is None:
            continue
        tried = _tried(room, unit, gangs, made_way=made_way)
        if tried is None:
            continue
        left += together
        if tried.placed:
            starting.append((tried, unit))
        else:
            waits.append(together)
    still.waited(() if room.full else waits)
    yield from adopt(state, left)
    for tried, unit in starting:
        yield from start(state, tried.placed, unit.of, unit.explanation, explain, tried.group, unit.turns)
    if room.full:
        yield continuation(state)


class _Tried(NamedTuple):
    """Empty: it waits on."""

    placed: tuple[Placed, ...] = ()
    group: Formed | None = None


def _tried(room: Allocation, unit: Waiting, gangs: Gangs, *, made_way: bool) -> _Tried | None:
    """None: it would not fit even when all stops are proven. A unit that still has to make way itself is not
    tried before it has."""
    if not all(job.in_line for job, _ in gangs):
        room.reserve([node_id for _, nodes in gangs for node_id in nodes])
        return _Tried()
    if unit.group is None:
        placed = room.give(gangs)
        return None if isinstance(placed, str) else _Tried(() if isinstance(placed, Waits) else placed)
    nodes = gangs[0][1]
    members = [*unit.group, *(job.job_id for job, _ in gangs)]
    group = room.form([(job_id, nodes) for job_id in members], waits=True, fit_then=made_way)
    if isinstance(group, Refusal):
        return None
    return _Tried() if isinstance(group, Waits) else _Tried(group.placed, group)


def _gangs(state: CellState, together: Sequence[PlanUnit]) -> Gangs | None:
    """The waiting jobs of a unit, and their nodes; None where it has expired, or one of its jobs neither
    waits in the queue nor returns to it."""
    first = together[0].proposed
    if first is None or len(together) < first.jobs:
        return None
    if first.valid_until_ms is not None and state.now_ms > first.valid_until_ms:
        return None
    gangs = [(state.jobs[unit.job_id], unit.nodes) for unit in together]
    return gangs if all(job.in_line or job.comes_back for job, _ in gangs) else None


def on_its_nodes(state: CellState, profile: str, job: JobState) -> Plan | None:
    """A placement where the policy found none: on the nodes that the profile reserved for the job, once these
    are free. Tasks of two kinds may block each other in the policy's choice."""
    unit = state.planned.get(job.job_id)
    if unit is None or unit.proposed is not None or not set(unit.nodes) <= state.nodes.keys():
        return None
    fit = fit_of(state, job.demand, unit.nodes)
    if len(fit) != job.demand.tasks or not ClusterView(state).holds(job.demand, fit):
        return None
    return place_as_tried(profile, state, Start(job, fit))


def first_fit(profile: str) -> Choose:
    """In place of a place stage: the first nodes that hold the job and are not reserved for a proposal."""

    def chosen(state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        del rng
        fit = ClusterView(state).fit(job.demand, reserved(state))
        return None if fit is None else place_as_tried(profile, state, Start(job, fit))

    return chosen


def reserved(state: CellState) -> int:
    """Set of the nodes that are reserved for waiting units."""
    return set_of(state.nodes[node_id].ordinal for node_id in reserved_nodes(state) if node_id in state.nodes)


def beside(state: CellState, profile: str, choose: Choose) -> Choose:
    """As `choose`, unless it uses nodes reserved for waiting units; then on other nodes, by first fit."""
    taken, otherwise = reserved_nodes(state), first_fit(profile)
    if not taken:
        return choose

    def chosen(state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        plan = choose(state, job, rng)
        return plan if plan is None or taken.isdisjoint(plan.nodes) else otherwise(state, job, rng)

    return chosen
