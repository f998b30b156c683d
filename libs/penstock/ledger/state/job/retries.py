"""Earlier attempts of a job that ended before their work did, by cause, and what the next one avoids. The
placer decides whether there is a next one (`core/waiting/retries.py`)."""

from collections.abc import Mapping

from penstock.model.nouns.types import Value

MAX_FAILED_ON = 8  # nodes; a job that failed on more is its own fault


class Retries(Value, frozen=True):
    """Written by `evolve_jobs.job_requeued` and `evidence.noted`."""

    losses: int = 0
    """Attempts lost to nodes and refusals; bounded, since the job itself may crash its nodes."""
    infrastructure: int = 0
    """Attempts lost to nodes, refusals or preemption; they do not count against the user's limit."""
    memory: int = 0
    """Those of them that ran out of memory under a guessed limit; bounded, since more memory may not help."""
    short_of: Mapping[str, int] = {}
    """Role and memory (`penstock.ledger.derived.memory.short_key`) → MiB that such attempts had; the next one
    must have more."""
    failed_on: Mapping[str, int] = {}
    """Node → slots of the GPUs on which attempts failed by themselves, the latest node last, bounded: the
    next attempt avoids them."""


NO_RETRIES = Retries()
