"""Co-location of a job: which jobs hold parts of its GPUs, and its group. Measurements of co-located jobs are
not comparable to those of jobs that ran alone."""

from penstock.model.decisions.groups import Turns
from penstock.model.nouns.types import Value


class Sharing(Value, frozen=True):
    """Co-location of a job's latest attempt (`evolve_sharing`, `evolve_groups`)."""

    jobs: tuple[str, ...] = ()
    """Ids of other jobs that hold a part of one of its GPUs now, sorted."""
    since_ms: int = 0
    """Ledger time since which `jobs` is unchanged."""
    ever: bool = False
    """Whether there was such a job at any time of the attempt."""
    group: str = ""
    """Id of the group of which its attempt is a member (`penstock.ledger.derived.groups`); empty: it has its
    GPUs alone."""
    turns: Turns | None = None
    """Interleaving of the group's members, as predicted when the group was formed. None: it has its GPUs
    alone, or nothing was predicted."""
    measured: float | None = None
    """Part of its time in which it does not wait for turns, 0 – 1, as last reported. None: it has its GPUs
    alone, or has reported no waits."""
    short_ms: int | None = None
    """Ledger time since which it is slower than its group's plan promised
    (`penstock.ledger.derived.promises`). None: it is not."""


ALONE = Sharing()
