"""The latest move of a job: who asked for it, its target while that is reserved, and what became of it."""

from typing import Literal

from penstock.model.types import TaskPlacement, Value


class Move(Value, frozen=True):
    """The latest move of a job."""

    attempt: int
    """The one that was stopped for it."""
    nodes: tuple[str, ...]
    by: str
    reason: str
    at_ms: int
    token: int
    """Of the decision."""
    outcome: Literal["under_way", "arrived", "given_up"] = "under_way"
    problem: str = ""
    """Why it was given up."""
    tasks: tuple[TaskPlacement, ...] = ()
    """The target, while it is under way."""
