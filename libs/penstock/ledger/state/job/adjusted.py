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


class TaskCores(Value, frozen=True):
    """What services have made of a task's cores since it was placed (`evolve_adjustments`); the cores
    themselves are in its place."""

    placed: int = 0
    """Number of cores with which it was placed."""
    adjusted: Adjustment | None = None
    """The latest change."""
    trial: tuple[int, ...] = ()
    """Cores that the task may use during a trial with fewer cores; empty: all. The other cores of its place
    stay reserved for the task."""
    probes: int = 0
    """Number of core counts that services have probed for it."""
    settled: bool = False
    """Whether a service's search for its core count has ended, which happens once."""
    throttled_from: int = 0
    """Its core count before services took some because of contention; 0: they took none, or gave them
    back."""


class AdjustmentCounts(Value, frozen=True):
    """Counters that bound services' adjustments of a job (`penstock.proposals.validate_adjustments`)."""

    core_changes: int = 0
    """How often a service has changed the cores of one of its tasks; changes back to the placement's number
    are not counted."""
    throttles: int = 0
    """How often a service has slowed one of its tasks because of contention."""


AS_PLACED, NOT_ADJUSTED = TaskCores(), AdjustmentCounts()
