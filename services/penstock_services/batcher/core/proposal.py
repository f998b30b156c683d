"""Truncation of a plan to a proposal within the bounds of one: the plan's first units are proposed, the rest
is cut off."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_RANKS, JobRank
from penstock.model.decisions.plans import MAX_PLANNED_STOPS, MAX_PROPOSED_UNITS, MAX_UNITS
from penstock.model.nouns.types import MAX_GANG_TASKS
from penstock.model.proposals import (
    MAX_UNIT_JOBS,
    PlanProposed,
    ProposedUnit,
    ReadVersion,
)
from penstock.model.schema.topics import MAX_PLAN_BYTES
from penstock.model.wire.codec import encode
from penstock.proposals.validate_plans import MAX_PLAN_TASKS
from penstock.scheduling.stages.regroup import PROPOSER

SHRINK = 0.9  # of what would fit if all units had the same length
MAX_SHRINKS = 32  # 256 units x 0.9^32 are fewer than ten; then nothing is proposed


Item = TypeVar("Item")


class Planned(NamedTuple):
    """The changes that a stage wants; all empty: nothing changes."""

    units: Sequence[ProposedUnit] = ()
    stops: Sequence[str] = ()
    ranks: Sequence[JobRank] = ()


class Bounded(NamedTuple):
    """`proposal`: None where there is nothing to do.
    `cut`: the plan goes on, and the next proposal has the rest."""

    proposal: PlanProposed | None
    cut: bool


def proposal_of(state: CellState, planned: Planned, proposal_id: str, valid_until_ms: int) -> Bounded:
    """`state`: the one that `planned` was made on; the versions of the waiting jobs are named.

    Ideal: the versions of everything that it touches. Departure: a node's version changes with every exit on
    it, and a running job's with every checkpoint; the placer checks capacity and members on its current
    state, so these versions would refuse what still fits.
    """
    units = _first(planned.units)
    stops, ranks = planned.stops[:MAX_PLANNED_STOPS], planned.ranks[:MAX_RANKS]
    for _ in range(MAX_SHRINKS):
        if not (units or stops or ranks):
            return Bounded(None, False)
        found = PlanProposed(
            proposal_id=proposal_id,
            proposer=PROPOSER,
            read=_read(state, units),
            units=tuple(units),
            valid_until_ms=valid_until_ms,
            stops=tuple(stops),
            ranks=tuple(ranks),
        )
        size = len(encode(found))
        if size <= MAX_PLAN_BYTES:
            cut = any(
                len(part) < len(whole) for part, whole in zip((units, stops, ranks), planned, strict=True)
            )
            return Bounded(found, cut)
        share = SHRINK * MAX_PLAN_BYTES / size
        units, stops, ranks = _part(units, share), _part(stops, share), _part(ranks, share)
    return Bounded(None, True)


def _part(whole: Sequence[Item], share: float) -> Sequence[Item]:
    return whole[: int(len(whole) * share)]


def _first(units: Sequence[ProposedUnit]) -> Sequence[ProposedUnit]:
    """As many as one plan may have; a unit that is too large for any plan is left out."""
    found: list[ProposedUnit] = []
    jobs = tasks = 0
    for unit in units:
        needs = sum(len(job.nodes) for job in unit.jobs)
        if needs > MAX_GANG_TASKS or len(unit.jobs) > MAX_UNIT_JOBS:
            continue
        jobs, tasks = jobs + len(unit.jobs), tasks + needs
        if len(found) == MAX_PROPOSED_UNITS or jobs > MAX_UNITS or tasks > MAX_PLAN_TASKS:
            break
        found.append(unit)
    return found


def _read(state: CellState, units: Sequence[ProposedUnit]) -> tuple[ReadVersion, ...]:
    waiting = (
        job
        for unit in units
        for planned in unit.jobs
        if (job := state.jobs.get(planned.job_id)) is not None and job.in_line
    )
    return tuple(ReadVersion(kind="job", id=job.job_id, version=job.version) for job in waiting)
