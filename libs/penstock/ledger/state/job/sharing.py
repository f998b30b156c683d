"""Co-location of a job: which jobs hold parts of its GPUs. Measurements of co-located jobs are not comparable
to those of jobs that ran alone."""

from penstock.model.nouns.types import Value


class Sharing(Value, frozen=True):
    """Co-location of a job's latest attempt."""

    jobs: tuple[str, ...] = ()
    """Ids of other jobs that hold a part of one of its GPUs now, sorted."""
    since_ms: int = 0
    """Ledger time since which `jobs` is unchanged."""
    ever: bool = False
    """Whether there was such a job at any time of the attempt."""


ALONE = Sharing()
