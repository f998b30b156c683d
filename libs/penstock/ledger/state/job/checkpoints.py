"""The latest checkpoint of a job, as `TaskCheckpointed` reported it."""

from penstock.model.nouns.types import Value

WEIGHT = 0.125  # as for round-trip times, RFC 6298 §2: one slow disk access does not count for long


class Checkpoint(Value, frozen=True):
    """Where the next attempt may resume (`penstock.ledger.derived.resuming`), and how long saving took."""

    path: str
    iteration: int | None
    node_id: str
    attempt: int
    at_ms: int
    """Ledger time of the report."""
    save_ms: int
    size_bytes: int
    shared: bool
    usual_save_ms: float = 0.0
    """Exponential moving average over the job's checkpoints, ≥ 0; each has weight `WEIGHT`, the first one
    weight 1."""
    fetched_from: str = ""
    """The node from which it was fetched; empty: it was saved where it is."""
    problem: str = ""
    """Why the latest attempt that had to fetch it could not; empty: it could."""


class Unsaved(Value, frozen=True):
    """A request to save that no process of the attempt took."""

    reason: str
    at_ms: int
    """Ledger time of the report."""


class Saving(Value, frozen=True):
    """What is saved of the job's work."""

    checkpoint: Checkpoint | None = None
    """The latest checkpoint, of any attempt. None: none was reported."""
    unsaved: Unsaved | None = None
    """Why its attempt cannot save, though it is to save by the SDK. None: no node has reported this, or it
    has saved since."""
    kept_ms: int = 0
    """Work of earlier attempts that the checkpoint contains, from which the current or next attempt resumes,
    ≥ 0."""


NOT_SAVED = Saving()


def smoothed(before: Checkpoint | None, save_ms: int) -> float:
    """`Checkpoint.usual_save_ms` of the next checkpoint."""
    return (
        float(save_ms) if before is None else before.usual_save_ms + WEIGHT * (save_ms - before.usual_save_ms)
    )
