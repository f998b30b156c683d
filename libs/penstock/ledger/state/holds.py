"""Cordons of nodes and holds of jobs: orders by operators and users that stay in force."""

from penstock.model.nouns.types import Value


class Cordon(Value, frozen=True):
    """An operator's order to place nothing new on a node."""

    drain: bool
    """Whether its jobs must leave it, too."""
    by: str
    reason: str
    at_ms: int


class Hold(Value, frozen=True):
    """An order not to start a job."""

    by: str
    reason: str
    at_ms: int
    by_operator: bool
    """Whether an operator gave the order: then no tenant's token releases it."""
