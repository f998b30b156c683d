"""How many cores a training job starts with, and which number to try next while it runs.

Source: CODA §V-B. `n_start` and `walk` follow it; `search` is our default. Both walks are pure functions of what was
seen so far: the caller gives the job the cores that they name, measures its speed, and asks again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.types import Category

FIRST: dict[Category, int] = {"cv": 3, "nlp": 5, "speech": 5}
"""For an owner's first job. Source: CODA §V-B1."""
FIRST_UNKNOWN = 3  # neither history nor category; the paper leaves it open, the most frequent category has 3
ACROSS_NODES = 2  # a job on several nodes needs no more, the network holds it back. Source: CODA §IV-B2
MAX_PROBES = 4  # Source: CODA §VI-F, 3 to 4 of 90 s each
MAX_CORES = 1_024
KEEPS = 0.95  # of the best speed seen: what `search` takes for as good as the best


class CoreJob(NamedTuple):
    """What the owner says of the job; everything may be unsaid."""

    category: Category | None = None
    pipelined: bool = False
    """Loading overlaps with training."""
    many_weights: bool = False
    heavy_preprocessing: bool = False
    """Between iterations."""
    gpus: int = 1
    nodes: int = 1


class PastJob(NamedTuple):
    """A finished job of the same owner and the cores that it had at the end (over its GPUs, on one node)."""

    category: Category | None
    cores: int
    gpus: int = 1


class Start(NamedTuple):
    """Cores to begin with, and why."""

    cores: int
    reason: str


def n_start(job: CoreJob, past: Sequence[PastJob], most: int, *, scaled: bool = False) -> Start:
    """N_start, 1 to `most`.

    The largest core count of the owner's past jobs in the category (of all of them where no category is given),
    else 3, 5 or 5 by category; less 1 if pipelined, less 1 with many weights, more 1 with heavy preprocessing.
    Source: CODA §V-B1. Past jobs with less than one core or more than MAX_CORES are left out.

    `scaled` departs: counts are per GPU, times the job's GPUs (§IV-B2: demand is linear in the GPUs of a node);
    on several nodes never above ACROSS_NODES.
    """
    _check_most(most)
    alike = [
        one
        for one in past
        if (job.category is None or one.category == job.category)
        and 1 <= one.cores <= MAX_CORES
        and 1 <= one.gpus <= MAX_CORES
    ]
    if alike:
        begin = max(one.cores / (one.gpus if scaled else 1) for one in alike)
        reason = f"the most of {len(alike)} past job{'s' if len(alike) > 1 else ''} of the owner"
    elif job.category is not None:
        begin, reason = FIRST[job.category], f"the owner's first job of category {job.category}"
    else:
        begin, reason = FIRST_UNKNOWN, "neither history nor category is known"
    for said, move, why in (
        (job.pipelined, -1, "pipelined"),
        (job.many_weights, -1, "many weights"),
        (job.heavy_preprocessing, +1, "heavy preprocessing"),
    ):
        if said:
            begin += move
            reason += f"; {why}: {move:+d}"
    if scaled and job.gpus > 1:
        begin *= job.gpus
        reason += f"; {job.gpus} GPUs"
    if scaled and job.nodes > 1 and begin > ACROSS_NODES:
        begin = ACROSS_NODES
        reason += f"; on {job.nodes} nodes at most {ACROSS_NODES}"
    return Start(min(max(-int(-begin // 1), 1), most), reason)


def _check_most(most: int) -> None:
    if not 1 <= most <= MAX_CORES:
        raise ValueError(f"at most {most} cores: must be 1 to {MAX_CORES}")
