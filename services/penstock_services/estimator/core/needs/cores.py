"""How many cores a training job starts with, and which number to try next while it runs.

Source: CODA §V-B. `n_start` and `walk` follow it; `search` is our default. Both walks are pure functions of what was
seen so far: the caller gives the job the cores that they name, measures its speed, and asks again.
"""

from collections.abc import Sequence
from math import isfinite
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


class Seen(NamedTuple):
    """One number of cores that the job ran with, and its speed there (or GPU utilisation), ≥ 0, any unit."""

    cores: int
    speed: float


class Next(NamedTuple):
    """`settled`: the job stays at `cores`; otherwise they are the next to try."""

    cores: int
    settled: bool


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


def walk(start: int, seen: Sequence[Seen], most: int, probes: int = MAX_PROBES) -> Next:
    """CODA's walk in steps of one core. Source: CODA §V-B2.

    First fewer, while speed improves; if the first step down did not help, more, while it improves. `seen`: in
    the order tried, the start first. Empty: the start is yet to be measured, which is no probe.
    """
    speed = _speeds(start, seen, most)
    if not speed:
        return Next(start, settled=False)
    if len(speed) > probes:
        return Next(_fastest(speed, start), settled=True)
    for direction in (-1, +1):
        cores = start
        while 1 <= cores + direction <= most:
            after = cores + direction
            if after not in speed:
                return Next(after, settled=False)
            if speed[after] <= speed[cores]:
                break
            cores = after
        if cores != start:
            return Next(cores, settled=True)
    return Next(start, settled=True)


def search(start: int, seen: Sequence[Seen], most: int, probes: int = MAX_PROBES) -> Next:
    """Our default: the fewest cores that keep 95 % of the best speed, found by doubling and halving.

    Ideal: measure every count. Departure from CODA's steps of one: speed is close to linear up to the best count,
    so that twice the cores show at once whether cores are short (a job that needs 12 and starts at 3 is out of
    reach of four single steps), and half of them whether they are too many. More cores go first: a starved job
    wastes GPUs, one with too many wastes cores. Between a count that is short and one that is not, the middle.
    """
    speed = _speeds(start, seen, most)
    if not speed:
        return Next(start, settled=False)
    best = max(speed.values())
    enough = min(cores for cores, found in speed.items() if found >= KEEPS * best)
    if len(speed) > probes:
        return Next(enough, settled=True)
    tried = sorted(speed)
    widest = tried[-1]
    gains = len(tried) == 1 or speed[widest] * KEEPS > speed[tried[-2]]
    if gains and widest < most:
        return Next(min(2 * widest, most), settled=False)
    short = max((cores for cores in tried if cores < enough), default=0)
    if enough - short <= 1:
        return Next(enough, settled=True)
    return Next((enough + short) // 2, settled=False)


def _speeds(start: int, seen: Sequence[Seen], most: int) -> dict[int, float]:
    """Cores → speed; the last word counts. Raises `ValueError` with everything that is wrong."""
    _check_most(most)
    problems = [
        f"{one.cores} cores at speed {one.speed}: cores must be 1 to {most} and the speed a number ≥ 0"
        for one in seen
        if not (1 <= one.cores <= most and isfinite(one.speed) and one.speed >= 0)
    ]
    if not 1 <= start <= most:
        problems.append(f"start {start} is not 1 to {most}")
    if seen and seen[0].cores != start:
        problems.append(f"the first cores seen are {seen[0].cores}, not the start {start}")
    if problems:
        raise ValueError("; ".join(problems))
    return {one.cores: one.speed for one in seen}


def _fastest(speed: dict[int, float], start: int) -> int:
    """Ties go to the start, then to fewer cores."""
    return min(speed, key=lambda cores: (-speed[cores], cores != start, cores))


def _check_most(most: int) -> None:
    if not 1 <= most <= MAX_CORES:
        raise ValueError(f"at most {most} cores: must be 1 to {MAX_CORES}")
