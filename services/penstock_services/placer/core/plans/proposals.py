"""Answers to proposals of other services: the proposed changes are decided, or refused with the reason (LAW
1)."""

from collections.abc import Iterator
from typing import Any

from penstock.cluster.refusal import Refusal
from penstock.ledger.fold.evolve_jobs import rank_of
from penstock.ledger.fold.plans import proposal_key
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobPreempted, JobRank, JobsRanked, ProposalAnswered
from penstock.model.decisions.plans import PlanUnit, UnitRef
from penstock.model.decisions.refusals import MAX_UNIT_DETAIL, StopRefused, UnitRefused
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.proposals import MigrationProposed, PlanProposed
from penstock.model.schema.event import Event
from penstock.proposals.plan_stops import MakesWay, validate_after_stops, validate_with_stops
from penstock.proposals.validate import validate
from penstock.proposals.validate_plans import ValidatedUnit
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core.common import continuation, stop
from penstock_services.placer.core.explaining import Explain
from penstock_services.placer.core.plans import moves, units
from penstock_services.placer.core.plans.adjustments import decided


def answer(state: CellState, event: Any, profile: Profile, explain: Explain) -> Iterator[Event]:
    """The parts of a proposal that are valid on this state, and the answer. A duplicate gets the first one's
    answer."""
    about: dict[str, Any] = {"proposal_id": event.proposal_id, "proposer": event.proposer}
    former = state.proposals.get(proposal_key(event.proposer, event.proposal_id))
    if former is not None:
        verdict: dict[str, Any] = {"verdict": former.verdict, "reason": former.reason}
        yield ProposalAnswered(**about, **verdict, detail=former.detail, copy_of=former.seq)
        return
    if isinstance(event, PlanProposed):
        yield from _plan(state, event, profile, explain)
        return
    found = validate(state, event)
    if found.accepted:
        yield from (
            moves.decided(state, event, explain)
            if isinstance(event, MigrationProposed)
            else decided(state, event)
        )
    yield ProposalAnswered(
        **about,
        verdict="accepted" if found.accepted else "refused",
        reason=found.reason,
        detail=found.detail[:MAX_TEXT],
    )


def _plan(state: CellState, event: PlanProposed, profile: Profile, explain: Explain) -> Iterator[Event]:
    """Units that may start do, nodes are reserved for those that wait for stops; each is answered."""
    about: dict[str, Any] = {"proposal_id": event.proposal_id, "proposer": event.proposer}
    found, stops = validate_with_stops(state, event, profile)
    if (stops.made or stops.refused) and not isinstance(found, Refusal):
        for makes_way in stops.made:
            yield from _stop(state, event, makes_way)
        found = validate_after_stops(state, event, profile, found)
    if isinstance(found, Refusal):
        yield ProposalAnswered(
            **about, verdict="refused", reason=found.reason, detail=found.detail[:MAX_TEXT]
        )
        return
    starting: list[tuple[ValidatedUnit, UnitRef]] = []
    waiting: list[PlanUnit] = []
    refused: list[UnitRefused] = []
    for validated in found.units:
        ref = UnitRef(**about, unit=validated.number)
        if validated.refusal is not None:
            why, detail = validated.refusal
            refused.append(UnitRefused(unit=validated.number, reason=why, detail=detail[:MAX_UNIT_DETAIL]))
        elif validated.placed or validated.group is not None:
            starting.append((validated, ref))
        else:
            waiting += units.waiting(state, validated.unit, ref, event.valid_until_ms)
    if ranks := _changed_ranks(state, event):
        yield JobsRanked(ranks=ranks)
    if len(refused) < len(found.units):
        yield from units.adopt(state, waiting)
    for validated, ref in starting:
        unit = validated.unit
        yield from units.start(
            state, validated.placed, ref, unit.explanation, explain, validated.group, unit.turns
        )
    first = refused[0] if refused and len(refused) == len(found.units) else None
    yield ProposalAnswered(
        **about,
        verdict="accepted" if first is None else "refused",
        reason="" if first is None else first.reason,
        detail="" if first is None else first.detail,
        started=len(starting),
        waiting=len(found.units) - len(starting) - len(refused),
        refused=tuple(refused),
        stopped=len(stops.made),
        not_stopped=tuple(
            StopRefused(job_id=job_id, reason=why.reason, detail=why.detail[:MAX_UNIT_DETAIL])
            for job_id, why in stops.refused
        ),
    )
    if found.full:
        yield continuation(state)


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
