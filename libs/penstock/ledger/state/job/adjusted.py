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
