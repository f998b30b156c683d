"""Answers to proposals of other services: what they ask is decided, or refused with the reason (LAW 1)."""

from collections.abc import Iterator
from typing import Any

from penstock.ledger.memory import capped
from penstock.ledger.state import CellState
from penstock.model import ledger_events
from penstock.model.event import Event
from penstock.model.types import MAX_TEXT
from penstock.policies.validate import validate
from penstock_services.placer.core.common import start_deadline


def answer(state: CellState, event: Any) -> Iterator[Event]:
    """The placements of a plan that `validate` accepts, all or none, and the answer."""
    verdict = validate(state, event)
    if verdict.accepted:
        for plan in event.plans:
            job = state.jobs[plan.job_id]
            yield ledger_events.PlacementDecided(
                job_id=job.job_id, attempt=job.attempt + 1, tasks=capped(state, job, plan.tasks)
            )
            yield start_deadline(state, job)
    yield ledger_events.ProposalAnswered(
        proposal_id=event.proposal_id,
        proposer=event.proposer,
        verdict="accepted" if verdict.accepted else "refused",
        reason=verdict.reason,
        detail=verdict.detail[:MAX_TEXT],
    )
