"""The latest adjustment of a running task's cores or memory bandwidth: who decided it, and what its node has answered."""

from penstock.model.types import Value


class Adjustment(Value, frozen=True):
    """The desired state itself stands beside it, in the task."""

    token: int
    """Of the decision and of its order."""
    by: str
    reason: str
    at_ms: int
    enforced: str = ""
    """By what (`TaskAdjusted.enforced`). Empty: not, or its node has not answered."""
    problem: str = ""
    """Why its node cannot obey."""

    @property
    def answered(self) -> bool:
        """Whether its node has the order for sure."""
        return bool(self.enforced or self.problem)
