"""How an attempt ends: the decision to stop it, or its own exit."""

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


NO_STOP, NO_EXIT = Stop(), Exit()
