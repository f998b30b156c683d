"""The latest adjustment of a running task's cores or memory bandwidth: which service or user asked for it,
and what its node has answered."""

from penstock.model.nouns.types import Value


class Adjustment(Value, frozen=True):
    """One adjustment. The desired state itself is a field of the task."""

    token: int
    """Token of the decision and of its order."""
    by: str
    """The operator or the proposer; empty: neither, the ledger has lost records."""
    reason: str
    at_ms: int
    enforced: str = ""
    """The mechanism that enforces it (`TaskAdjusted.enforced`). Empty: none, or its node has not answered."""
    problem: str = ""
    """Why its node cannot obey."""

    @property
    def answered(self) -> bool:
        """Whether its node has certainly received the order."""
        return bool(self.enforced or self.problem)


class AdjustmentCounts(Value, frozen=True):
    """Counters that bound services' adjustments of a job (`penstock.proposals.validate_adjustments`)."""

    core_changes: int = 0
    """How often a service has changed the cores of one of its tasks; changes back to the placement's number
    are not counted."""
    throttles: int = 0
    """How often a service has slowed one of its tasks because of contention."""


NOT_ADJUSTED = AdjustmentCounts()
