"""Interface of workload generators: each is a pure function of its seed and of measured tables, so equal
seeds give equal jobs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.simulator.traces.files.importing import data_path
from penstock.simulator.traces.jobs import TraceJob

HOUR_S = 3_600.0


class Generator(NamedTuple):
    """A workload with its cluster and job model."""

    text: str
    """One line that describes it."""
    cluster: str
    """The source's cluster, as `--cluster` takes it."""
    job_model: str
    """The job model of its jobs, as `--truth` takes it."""
    make: Callable[[int], Sequence[TraceJob]]
    """Seed → jobs by arrival. Raises `BadFile` if a table is missing."""


class Family(NamedTuple):
    """Generators whose names begin alike, `family/…`: what an entry point of the group `penstock.generators`
    names."""

    listed: Mapping[str, Generator]
    """Those that are listed, by whole name."""
    other: Callable[[str], Generator | None] = lambda name: None
    """Whole name → a generator that is not listed. None: there is none of this name."""


def source(generator: str, where: str) -> Path:
    """A measured table below the data folder. Raises `BadFile` if it does not exist."""
    return data_path(where, "this generator", f"{generator}/…")


def rng_of(seed: int, purpose: str) -> np.random.Generator:
    """A random generator per purpose, so that the samples of one never shift those of another. Any whole
    seed."""
    return np.random.default_rng(np.random.SeedSequence((abs(seed), int(seed < 0), *purpose.encode())))


def poisson_arrivals(rng: np.random.Generator, per_hour: float, hours: float) -> Sequence[float]:
    """Times of arrival in seconds, rising, below `hours`; on average `per_hour` in each hour."""
    times: list[float] = []
    now_s = float(rng.exponential(HOUR_S / per_hour))
    while now_s < hours * HOUR_S:
        times.append(now_s)
        now_s += float(rng.exponential(HOUR_S / per_hour))
    return times
