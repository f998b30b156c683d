"""Suspicion of a node: the reason, and the state of the proof that its tasks are dead (decision 40)."""

from penstock.model.nouns.types import Value


class Suspicion(Value, frozen=True):
    """Why a node is suspect, and the state of the proof."""

    reason: str
    at_ms: int
    probe: int = 0
    """Token of its probe; 0: none."""
    sent_ms: int = 0
    """Ledger time at which the probe was known to be in the log, in `sent_term`. 0: not known."""
    sent_term: int = 0
    expired: bool = False
    """Whether the probe stayed unanswered for long enough."""
