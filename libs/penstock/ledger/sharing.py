"""Co-location of a job: who holds parts of its GPUs. What ran beside others is not comparable to what ran alone."""

from penstock.model.types import Value


class Sharing(Value, frozen=True):
    """Of a job's latest attempt."""

    jobs: tuple[str, ...] = ()
    """Ids of other jobs that hold a part of one of its GPUs now, sorted."""
    since_ms: int = 0
    """Ledger time from which on it is these."""
    ever: bool = False
    """Whether there was any at any time of the attempt."""


ALONE = Sharing()
