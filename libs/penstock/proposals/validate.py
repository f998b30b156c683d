"""Validation of proposals: whether one may be accepted on exactly this state. Proposers and the placer call
the same function (LAW 1).

Conflicts are fine-grained (optimistic concurrency): only the versions that a proposal names are compared.
Each unit of a plan is validated separately (`validate_plans`).
"""

from typing import Literal, NamedTuple

from penstock.cluster.reasons import Refusal
from penstock.ledger.state.state import CellState
from penstock.model.decisions.refusals import Refused
from penstock.model.proposals import (
    CoresProposed,
    MigrationProposed,
    PlanProposed,
    Proposal,
    ThrottleProposed,
)
from penstock.proposals import validate_adjustments, validate_plans
from penstock.scheduling.acting import validate_moves

RefusalReason = Literal["", Refused]
"""See `ProposalAnswered`."""


class Verdict(NamedTuple):
    """The answer to a proposal; `reason` is empty iff accepted."""

    accepted: bool
    reason: RefusalReason
    detail: str


ACCEPTED = Verdict(True, "", "")


def _refused(reason: RefusalReason, detail: str) -> Verdict:
    return Verdict(False, reason, detail)


def validate(state: CellState, proposal: Proposal) -> Verdict:
    """Validates plans, which are accepted if any unit is, moves and adjustments. Never changes the state."""
    if isinstance(proposal, CoresProposed | ThrottleProposed):
        return _stale(state, proposal) or _adjustment(state, proposal)
    if isinstance(proposal, MigrationProposed):
        return _stale(state, proposal) or _move(state, proposal)
    if not isinstance(proposal, PlanProposed):
        return _refused("unsupported", f"{proposal.TYPE} is not acted on by this placer")
    found = validate_plans.validate_plan(state, proposal)
    if isinstance(found, Refusal):
        return _refused(*found)
    refusals = [unit.refusal for unit in found.units if unit.refusal is not None]
    return _refused(*refusals[0]) if len(refusals) == len(found.units) else ACCEPTED


def _adjustment(state: CellState, proposal: CoresProposed | ThrottleProposed) -> Verdict:
    wrong = validate_adjustments.refused(state, proposal)
    return ACCEPTED if wrong is None else _refused(*wrong)


def _move(state: CellState, proposal: MigrationProposed) -> Verdict:
    found = validate_moves.validate_move(state, proposal)
    return _refused(*found) if isinstance(found, Refusal) else ACCEPTED


def _stale(state: CellState, proposal: Proposal) -> Verdict | None:
    """The refusal if a version from which the proposal was computed has changed; None: none has."""
    found = next((why for read in proposal.read if (why := validate_plans.moved_on(state, read))), None)
    return None if found is None else _refused("stale", found)
