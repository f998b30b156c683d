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


class Moves(Value, frozen=True):
    """The job's moves so far, and what services have asked of them (`evolve_moves`)."""

    latest: Move | None = None
    """Of any attempt."""
    converged_ms: int | None = None
    """When convergence was evaluated, once for its placement (`JobConverged`); None: it was not yet."""
    rebalanced: bool = False
    """Whether it was moved to balance load between nodes, which happens once."""
    migrations: int = 0
    """How often a service has moved it by its own rules (`MoveDecided.cause`)."""


NO_MOVES = Moves()
