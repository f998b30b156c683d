"""Reclaim stage of a profile: who gives back what it has borrowed, so that a job fits that does not now. No other job is stopped."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.arrays import ArraysSized
from penstock.model.plans import PlanUnit


class MovesOut(NamedTuple):
    """A job that goes on elsewhere."""

    job: JobState
    nodes: Sequence[str]
    """Of its tasks, in rank order."""


class Reclaimed(NamedTuple):
    """What happens for one job. No stops and no moves: only the nodes are reserved."""

    unit: PlanUnit
    """Its nodes, which are reserved until it starts."""
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
        """For a job that waits and does not fit; None: it waits on."""
        ...
