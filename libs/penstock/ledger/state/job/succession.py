"""Which jobs an attempt follows on its GPUs, and which follow it (`penstock.ledger.derived.succession`)."""

from penstock.model.nouns.types import Value


class Succession(Value, frozen=True):
    """Written by `evolve_jobs`; `false_ends` by `evolve_tasks`, too."""

    after: tuple[str, ...] = ()
    """Jobs that were being stopped or about to end at its placement; its attempt starts after they end."""
    prelaunch: bool = False
    """Whether its attempt launches before they have ended."""
    followed: bool = False
    """Whether another job is scheduled to start when this one ends by itself."""
    false_ends: int = 0
    """How often the end of its attempt was expected wrongly: it trained on after it had reported `saving`, or
    ran longer than its successor's wait."""


NO_SUCCESSION = Succession()
