"""Search for a training job's best number of cores while it runs: CODA's hill climbing in single steps, and a
search by doubling and halving.

Source: CODA §V-B2. Pure functions of the measurements so far: the caller sets the job's cores to the result,
measures its speed, and calls again. Departure: in the source each probe takes 90 s; here a probe ends when
the speed has settled (`penstock.scheduling.acting.settling`).
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from penstock.model.decisions.adjustments import MAX_CORE_PROBES
from penstock.model.nouns.types import MAX_CORES_PER_NODE
from penstock.scheduling.acting.settling import AGREES


class Seen(NamedTuple):
    """A number of cores with which the job ran,
    and its speed with them (or GPU utilisation), ≥ 0, any unit."""

    cores: int
    speed: float


class Next(NamedTuple):
    """`settled`: the job stays at `cores`; otherwise `cores` are the next to try."""

    cores: int
    settled: bool


ACROSS_NODES = 2
"""Cores of each worker of a job on several nodes, where the network is the bottleneck.
Source: CODA §IV-B2."""


def across_nodes(start: int, seen: Sequence[Seen], most: int, least: int = 1) -> Next:
    """For a job on several nodes: two cores per worker, at least `least`, if that keeps 95 % of its speed;
    else the cores that it has.

    Departure: the source gives two to all; here they are measured first, which is one probe.
    """
    speed, few = _speeds(start, seen, most), max(ACROSS_NODES, least)
    if not speed or start <= few:
        return Next(start, settled=start <= few)
    if len(speed) == 1:
        return Next(few, settled=False)
    return Next(few if keeps(speed[few], speed[start]) else start, settled=True)


def walk(start: int, seen: Sequence[Seen], most: int, least: int = 1, probes: int = MAX_CORE_PROBES) -> Next:
    """CODA's hill climbing in steps of one core. Source: CODA §V-B2.

    First fewer cores, while speed improves; if the first step down did not help, more, while it improves.
    `seen`: in the order tried, the start first. Empty: the start is measured next, which does not count as a
    probe. `least`: fewer are not tried.
    """
    speed = _speeds(start, seen, most)
    if not speed:
        return Next(start, settled=False)
    if len(speed) > probes:
        return Next(_fastest(speed, start), settled=True)
    for direction in (-1, +1):
        cores = start
        while least <= cores + direction <= most:
            after = cores + direction
            if after not in speed:
                return Next(after, settled=False)
            if speed[after] <= speed[cores]:
                break
            cores = after
        if cores != start:
            return Next(cores, settled=True)
    return Next(start, settled=True)


def search(
    start: int, seen: Sequence[Seen], most: int, least: int = 1, probes: int = MAX_CORE_PROBES
) -> Next:
    """Our default: the fewest cores that keep 95 % of the best speed, found by doubling and halving.

    Ideal: measure every count. Departure from CODA's steps of one: speed is close to linear up to the best
    count, so that twice the cores show at once whether cores are short (four single steps do not suffice for
    a job that needs 12 and starts at 3), and half of them whether they are too many. More cores are tried
    first: a starved job wastes GPUs, one with too many wastes cores. Between a count that is too low and one
    that suffices, the middle is tried.
    """
    speed = _speeds(start, seen, most)
    if not speed:
        return Next(start, settled=False)
    best = max(speed.values())
    enough = min(cores for cores, found in speed.items() if keeps(found, best))
    if len(speed) > probes:
        return Next(enough, settled=True)
    tried = sorted(speed)
    widest = tried[-1]
    gains = len(tried) == 1 or not keeps(speed[tried[-2]], speed[widest])
    if gains and widest < most:
        return Next(min(2 * widest, most), settled=False)
    short = max((cores for cores in tried if cores < enough), default=least - 1)
    if enough - short <= 1:
        return Next(enough, settled=True)
    return Next((enough + short) // 2, settled=False)


def keeps(speed: float, best: float) -> bool:
    """Whether the speed counts as equal to the best one, or above it."""
    return speed >= (1 - AGREES) * best


def _speeds(start: int, seen: Sequence[Seen], most: int) -> dict[int, float]:
    """Cores → speed; the last measurement counts. Raises `ValueError` with all problems."""
    if not 1 <= most <= MAX_CORES_PER_NODE:
        raise ValueError(f"at most {most} cores: must be 1 to {MAX_CORES_PER_NODE}")
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
