"""Answers to proposals of other services: the proposed changes are decided, or refused with the reason (LAW
1)."""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.cluster.reasons import Refusal
from penstock.cluster.view import Placed
from penstock.ledger.fold.evolve_jobs import rank_of
from penstock.ledger.fold.plans import proposal_key, units_of_profile
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import GroupDecided, Turns
from penstock.model.decisions.ledger_events import (
    JobPreempted,
    JobRank,
    JobsRanked,
    PlacementDecided,
    ProposalAnswered,
)
from penstock.model.decisions.plans import MAX_UNITS, PlanAdopted, PlanUnit, UnitRef, Waiting
from penstock.model.decisions.refusals import MAX_UNIT_DETAIL, StopRefused, UnitRefused
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.proposals import MigrationProposed, PlanProposed
from penstock.model.schema.event import Event
from penstock.proposals.plan_stops import MakesWay, Stops, validate_after_stops, validate_with_stops
from penstock.proposals.validate import validate
from penstock.proposals.validate_plans import ValidatedPlan, ValidatedUnit
from penstock.scheduling.groups.validate_groups import RUNS, Formed
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core.common import (
    Explain,
    continuation,
    explained,
    launches_early,
    start_deadline,
    stop,
)
from penstock_services.placer.core.plans import adjustments, moves


def answer(state: CellState, event: Any, profile: Profile, explain: Explain) -> Iterator[Event]:
    """The parts of a proposal that are valid on this state, and the answer. A duplicate gets the first one's
    answer."""
    former = state.proposals.get(proposal_key(event.proposer, event.proposal_id))
    if former is not None:
        verdict: dict[str, Any] = {"verdict": former.verdict, "reason": former.reason}
        yield ProposalAnswered(**_about(event), **verdict, detail=former.detail, copy_of=former.seq)
    elif isinstance(event, PlanProposed):
        yield from _plan(state, event, profile, explain)
    else:
        yield from _change(state, event, explain)


def _change(state: CellState, event: Any, explain: Explain) -> Iterator[Event]:
    """A move, or an adjustment of a running task."""
    found = validate(state, event)
    if found.accepted and isinstance(event, MigrationProposed):
        yield from moves.decided(state, event, explain)
    elif found.accepted:
        yield from adjustments.decided(state, event)
    yield ProposalAnswered(
        **_about(event),
        verdict="accepted" if found.accepted else "refused",
        reason=found.reason,
        detail=found.detail[:MAX_TEXT],
    )


def _plan(state: CellState, event: PlanProposed, profile: Profile, explain: Explain) -> Iterator[Event]:
    """A plan: units that may start do, nodes are reserved for those that wait for stops; each is answered."""
    # 1. Which units may start, and which stops they need.
    found, stops = validate_with_stops(state, event, profile)
    # 2. The stops; after these the places anew, since what is being stopped has successors.
    if (stops.made or stops.refused) and not isinstance(found, Refusal):
        for makes_way in stops.made:
            yield from _stop(state, event, makes_way)
        found = validate_after_stops(state, event, profile, found)
    if isinstance(found, Refusal):
        yield ProposalAnswered(
            **_about(event), verdict="refused", reason=found.reason, detail=found.detail[:MAX_TEXT]
        )
        return
    # 3. Ranks, for the proposer's next plan.
    if ranks := _changed_ranks(state, event):
        yield JobsRanked(ranks=ranks)
    # 4. Reservations for units that wait: they replace those of the former plan.
    if len(found.refused) < len(found.units):
        waiting = (_waiting(state, event, validated) for validated in found.units if validated.waits)
        yield from adopt(state, [unit for units in waiting for unit in units])
    # 5. The units that start.
    for validated in found.units:
        if validated.starts:
            unit, ref = validated.unit, _ref(event, validated)
            yield from start(
                state, validated.placed, ref, unit.explanation, explain, validated.group, unit.turns
            )
    # 6. The answer, and the rest of a plan that is too large for one record.
    yield _answered(event, found, stops)
    if found.full:
        yield continuation(state)


def _answered(event: PlanProposed, found: ValidatedPlan, stops: Stops) -> ProposalAnswered:
    """Accepted if any unit is; else the reason is that of the first unit."""
    refused = tuple(
        UnitRefused(
            unit=unit.number, reason=unit.refusal.reason, detail=unit.refusal.detail[:MAX_UNIT_DETAIL]
        )
        for unit in found.refused
        if unit.refusal is not None
    )
    first = refused[0] if refused and len(refused) == len(found.units) else None
    return ProposalAnswered(
        **_about(event),
        verdict="accepted" if first is None else "refused",
        reason="" if first is None else first.reason,
        detail="" if first is None else first.detail,
        started=sum(unit.starts for unit in found.units),
        waiting=sum(unit.waits for unit in found.units),
        refused=refused,
        stopped=len(stops.made),
        not_stopped=tuple(
            StopRefused(job_id=job_id, reason=why.reason, detail=why.detail[:MAX_UNIT_DETAIL])
            for job_id, why in stops.refused
        ),
    )


def _about(event: Any) -> dict[str, Any]:
    return {"proposal_id": event.proposal_id, "proposer": event.proposer}


def _ref(event: PlanProposed, validated: ValidatedUnit) -> UnitRef:
    return UnitRef(**_about(event), unit=validated.number)


def _changed_ranks(state: CellState, event: PlanProposed) -> tuple[JobRank, ...]:
    """Ranks of live jobs that have changed; of several of one job the last counts."""
    found = {rank.job_id: rank for rank in event.ranks if rank.job_id in state.jobs}
    return tuple(rank for job_id, rank in found.items() if state.jobs[job_id].rank != rank_of(rank))


def _stop(state: CellState, event: PlanProposed, found: MakesWay) -> Iterator[Event]:
    """Stops a job that makes way for a unit of the plan."""
    yield JobPreempted(
        job_id=found.job.job_id,
        attempt=found.job.attempt,
        by_job_id=found.by,
        reason=f"plan of {event.proposer}: {found.why}"[:MAX_TEXT],
    )
    yield from stop(state, found.job, "preempted")


def _waiting(state: CellState, event: PlanProposed, validated: ValidatedUnit) -> Iterator[PlanUnit]:
    """The unit as the ledger stores it: its jobs that are in the queue, or will be once they have made
    way."""
    unit = validated.unit
    queued = [job for job in unit.jobs if state.jobs[job.job_id].status not in RUNS]
    running = tuple(job.job_id for job in unit.jobs if job not in queued)
    group = running if unit.kind == "group" else None
    for number, job in enumerate(queued):
        why = "" if number else unit.explanation
        of = Waiting(
            of=_ref(event, validated),
            jobs=len(queued),
            explanation=why,
            valid_until_ms=event.valid_until_ms,
            group=group,
            turns=None if number else unit.turns,
        )
        yield PlanUnit(job_id=job.job_id, nodes=job.nodes, proposed=of)


def adopt(state: CellState, units: Sequence[PlanUnit]) -> Iterator[PlanAdopted]:
    """These replace all waiting units of proposals; the profile's reservations stay.

    Nothing where that changes nothing. Units beyond `MAX_UNITS` jobs are given up, the last ones first, each
    as a whole; their jobs stay in the queue.
    """
    named = {unit.job_id for unit in units}
    own = [unit for unit in units_of_profile(state) if unit.job_id not in named]
    found = (*_first_units(units, MAX_UNITS - len(own)), *own)
    if found != tuple(state.planned.values()):
        yield PlanAdopted(units=found)


def _first_units(units: Sequence[PlanUnit], most: int) -> Iterator[PlanUnit]:
    """The jobs of the first units, as long as whole units are within so many jobs."""
    begin = 0
    while begin < len(units):
        proposed = units[begin].proposed
        end = min(begin + (1 if proposed is None else proposed.jobs), len(units))
        if end > most:
            return
        yield from units[begin:end]
        begin = end


def start(
    state: CellState,
    placed: Sequence[Placed],
    ref: UnitRef,
    why: str,
    explain: Explain,
    group: Formed | None = None,
    turns: Turns | None = None,
) -> Iterator[Event]:
    """All jobs of one unit; the places were chosen on this state. `why`: the proposer's reason. `group`: they
    share GPUs, in these turns."""
    group_id = None
    if group is not None:
        decided = _grouped(state, group, ref, why, turns)
        group_id = decided.group_id
        yield decided
    for found in placed:
        job, tasks = state.jobs[found.job.job_id], found.tasks
        explain(explained(state, job, tasks, ref.proposer, why))
        yield PlacementDecided(
            job_id=job.job_id,
            attempt=job.attempt + 1,
            tasks=tasks,
            unit=ref,
            group=group_id,
            after=found.after,
            prelaunch=launches_early(state, job, found.after),
        )
        yield start_deadline(state, job)


def _grouped(state: CellState, found: Formed, ref: UnitRef, why: str, turns: Turns | None) -> GroupDecided:
    """`found`: on this very state. A new group is named after the record and the unit."""
    return GroupDecided(
        group_id=found.group_id or f"group-{state.token}-{ref.unit}",
        job_ids=(*found.running, *(placed.job.job_id for placed in found.placed)),
        by=ref.proposer,
        reason=why,
        turns=turns,
    )
