"""Refusals of proposals, units of plans and stops."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.decisions.plans import MAX_PROPOSED_UNITS
from penstock.model.nouns.types import Identifier, Value

MAX_UNIT_DETAIL = 256  # characters: 256 refused units stay far below what a record may take

Refused = Literal["stale", "infeasible", "unknown_job", "wrong_state", "unsupported", "invalid", "expired"]
"""Why a proposal, or a unit of one, is refused."""


class UnitRefused(Value, frozen=True, kw_only=True):
    """A unit of a proposed plan that is refused."""

    unit: Annotated[int, Meta(ge=0, lt=MAX_PROPOSED_UNITS)]
    """Index in the plan, from 0."""
    reason: Refused
    detail: Annotated[str, Meta(max_length=MAX_UNIT_DETAIL)]


class StopRefused(Value, frozen=True, kw_only=True):
    """A job that a proposed plan names among its stops, and that continues to run."""

    job_id: Identifier
    reason: Refused
    detail: Annotated[str, Meta(max_length=MAX_UNIT_DETAIL)]
