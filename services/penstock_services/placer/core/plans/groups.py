"""Group decisions: for units of plans whose jobs `penstock.scheduling.groups.validate_groups` lets share
GPUs."""

from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import GroupDecided, Turns
from penstock.model.decisions.plans import UnitRef
from penstock.scheduling.groups.validate_groups import Formed


def decided(
    state: CellState, found: Formed, unit: UnitRef, reason: str, turns: Turns | None = None
) -> GroupDecided:
    """`found`: on this very state. A new group is named after the record and the unit."""
    return GroupDecided(
        group_id=found.group_id or f"group-{state.token}-{unit.unit}",
        job_ids=(*found.running, *(placed.job.job_id for placed in found.placed)),
        by=unit.proposer,
        reason=reason,
        turns=turns,
    )
