"""Orders of people that stay in force: to place nothing on a node, not to start a job."""

from penstock.model.types import Value


class Cordon(Value, frozen=True):
    """An operator's order to place nothing new on a node."""

    drain: bool
    """Its jobs are to leave it, too."""
    by: str
    reason: str
    at_ms: int


class Hold(Value, frozen=True):
    """An order not to start a job."""

    by: str
    reason: str
    at_ms: int
    by_operator: bool
    """Then no tenant's token releases it."""
