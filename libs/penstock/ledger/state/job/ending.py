"""How an attempt ends: the decision to stop it, or its own exit and that of its tasks."""

from penstock.model.nouns.types import Value


class Stop(Value, frozen=True):
    """The latest decision to stop the job (`StopDecided`)."""

    reason: str | None = None
    """None: the attempt is not to stop."""
    detail: str = ""
    """Why it is stopped, in the words of the caller."""
    token: int = 0
    """Token of the decision."""


class Exit(Value, frozen=True):
    """The first failure of the job's latest attempt (`evolve_tasks`)."""

    code: int | None = None
    failure: str = ""
    """As text for users."""
    cause: str = ""
    """The cause of the task that failed."""


class TaskExit(Value, frozen=True):
    """How one task of the attempt ended, as its node reported (`evolve_tasks`)."""

    at_ms: int | None = None
    """Ledger time of the report. None: the task has not ended."""
    cause: str = ""
    succeeded: bool = False
    code: int | None = None
    note: str = ""
    """What its node has said of its success (`TaskExited.detail`), such as that processes left running
    were ended."""
    exhausted: str = ""
    """The memory in which one of its allocations failed (`TaskExited.exhausted`)."""
    outgrown_mib: int = 0
    """Host memory that it had when it ran out of it (`penstock.ledger.derived.memory`); 0: it did not."""
    gpu_limit_mib: int = 0
    """Limit under which it ran out of GPU memory, by its node; 0: by its place."""


NO_STOP, NO_EXIT, NOT_EXITED = Stop(), Exit(), TaskExit()
