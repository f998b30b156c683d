"""Whether a job that is tied to its follower has one (`penstock.ledger.state.followers`)."""

from penstock.model.nouns.types import Value


class Following(Value, frozen=True):
    """The latest report about the job's follower (`FollowerChanged`)."""

    gateway: str = ""
    """The run of a gateway that has the follower's connection; empty: none has, or the job is not tied."""
    absent_ms: int | None = None
    """Since when a tied job has had no follower. None: it has one, or is not tied."""
    seq: int = 0
    """Record of the report: earlier reports are out of date."""


NOT_TIED = Following()
