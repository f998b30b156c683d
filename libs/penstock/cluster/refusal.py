"""Refusals: why a proposal, or a unit of a plan, is not carried out."""

from typing import NamedTuple

from penstock.ledger.state.state import CellState
from penstock.model.decisions.refusals import Refused


class Refusal(NamedTuple):
    """The reason, and its text for users."""

    reason: Refused
    detail: str


def frozen(state: CellState) -> Refusal | None:
    """The refusal while the cell is frozen; None: the cell acts on proposals."""
    return Refusal("wrong_state", f"the cell is frozen: {state.frozen}") if state.frozen else None


def unknown(state: CellState, job_id: str) -> Refusal:
    """The refusal for a job that does not exist."""
    outcome = state.ended.get(job_id)
    return Refusal("unknown_job", f"{job_id} {f'has ended: {outcome}' if outcome else 'is unknown'}")
