"""The latest move (migration) of a job: the proposer, the target while it is reserved, and the outcome."""

from typing import Literal

from penstock.model.nouns.types import TaskPlacement, Value


class Move(Value, frozen=True):
    """The latest move of a job."""

    attempt: int
    """The attempt that was stopped for the move."""
    nodes: tuple[str, ...]
    by: str
    reason: str
    at_ms: int
    token: int
    """Token of the decision."""
    outcome: Literal["under_way", "arrived", "given_up"] = "under_way"
    problem: str = ""
    """Why the move was given up."""
    tasks: tuple[TaskPlacement, ...] = ()
    """The target, while the move is under way."""
