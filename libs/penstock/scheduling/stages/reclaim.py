"""Interface of reclaim stages: jobs that have borrowed resources give them back, so that a waiting job fits.
No other job is stopped."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.arrays import ArraysSized
from penstock.model.decisions.plans import PlanUnit


class MovesOut(NamedTuple):
    """A job that resumes elsewhere."""

    job: JobState
    nodes: Sequence[str]
    """Target nodes of its tasks, in rank order."""


class Reclaimed(NamedTuple):
    """A reclaim for one job. Without stops and moves only the nodes are reserved."""

    unit: PlanUnit
    """The job's nodes, which are reserved until it starts."""
    stops: Sequence[JobState] = ()
    """Jobs without GPUs that give back their cores."""
    moves: Sequence[MovesOut] = ()
    why: str = ""


class Reclaim(Protocol):
    """The same state must give the same answers."""

    def sizes(self, state: CellState) -> ArraysSized | None:
        """New sizes of the arrays, where they have to change. O(1) in jobs and nodes."""
        ...

    def reclaim(self, state: CellState, job: JobState) -> Reclaimed | None:
        """The reclaim for a waiting job that does not fit; None: it continues to wait."""
        ...

    def idle(self, state: CellState) -> bool:
        """Whether `reclaim` is certain to find nothing for any job now: a fast test."""
        ...
