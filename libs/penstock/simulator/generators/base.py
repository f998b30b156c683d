"""What a generator is. Each is a pure function of its seed and of measured tables: the same seed, the same jobs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.simulator.traces.importing import data_path
from penstock.simulator.traces.jobs import TraceJob

HOUR_S = 3_600.0


class Generator(NamedTuple):
    """A workload, and what it is meant to run on."""

    text: str
    """One line that describes it."""
    cluster: str
    """Of the source, as `--cluster` takes it."""
    job_model: str
    """What its jobs need, as `--truth` takes it."""
    make: Callable[[int], Sequence[TraceJob]]
    """Seed → jobs by arrival. Raises `BadFile` where it lacks a table."""


def source(generator: str, where: str) -> Path:
    """A measured table below the data. Raises `BadFile` where it is not there."""
    return data_path(where, "this generator", f"{generator}/…")


def rng_of(seed: int, purpose: str) -> np.random.Generator:
    """Of its own for each purpose, so that one generator's draws never shift another's. Any whole seed."""
    return np.random.default_rng(np.random.SeedSequence((abs(seed), int(seed < 0), *purpose.encode())))


def poisson_arrivals(rng: np.random.Generator, per_hour: float, hours: float) -> Sequence[float]:
    """Times of arrival in seconds, rising, below `hours`; on average `per_hour` in each hour."""
    times: list[float] = []
    now_s = float(rng.exponential(HOUR_S / per_hour))
    while now_s < hours * HOUR_S:
        times.append(now_s)
        now_s += float(rng.exponential(HOUR_S / per_hour))
    return times
