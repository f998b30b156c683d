"""`helios/<cluster>`: synthetic jobs sampled from a distribution with the published sums of a cluster.

Helios' summary has, per cluster, its GPUs, the number of GPU jobs, mean and median of their run times and of
their GPU counts, and their GPU time; no single job. One distribution has exactly these sums:

* GPU counts are powers of two up to the cluster, with probabilities that fall by a fixed ratio, chosen for
  the mean; single-GPU jobs are at least half, for the median is 1;
* run times are log-normal around a median that grows with the count by a fixed power: three parameters for
  mean, median and GPU time.

All else is assumed, and no result that validates the simulator rests on it: arrivals are Poisson at the rate
that asks for LOAD of the GPUs, jobs have no owners, nodes have 8 GPUs, and run times are cut at MOST_S. JOBS
jobs are sampled, not the month's hundreds of thousands, at the same rate.
"""

from collections.abc import Callable, Sequence
from math import erf, exp, log, sqrt
from pathlib import Path
from typing import NamedTuple

from scipy.optimize import brentq

from penstock.runtime.files.csv_import import BadFile, Problem, Row
from penstock.simulator.generators.base import Generator, rng_of
from penstock.simulator.job_models.measurements.measured import read_all
from penstock.simulator.traces.jobs import TraceJob

LOAD = 0.8
JOBS = 20_000
GPUS_PER_NODE = 8
LEAST_S, MOST_S = 1.0, 50 * 86_400.0  # the longest job of the Helios clusters; source: AcmeTrace's summary


class Sums(NamedTuple):
    """Published sums of a cluster's GPU jobs; seconds, GPU seconds."""

    cluster: str
    gpus: int
    jobs: int
    mean_run_s: float
    median_run_s: float
    mean_gpus: float
    gpu_s: float


class Law(NamedTuple):
    """The distribution. `shares`: of the jobs with 1, 2, 4, … GPUs. ln(run time) has mean `mu` + `growth` ·
    log2(GPUs) and deviation `sigma`."""

    shares: Sequence[float]
    mu: float
    growth: float
    sigma: float


def read_sums(path: Path) -> Sequence[Sums]:
    """The sums per cluster: one per line except the total. Raises `BadFile`."""
    columns = {"id", "gpu_num", "gpu_job_num", "avg_run_time_gpu", "med_run_time_gpu", "avg_gpu_num"}
    times = ("complete_gpu_time", "cancel_gpu_time", "fail_gpu_time")

    def read(row: Row) -> Sums:
        return Sums(
            row.name("id"),
            row.whole("gpu_num", least=1),
            row.whole("gpu_job_num", least=1),
            row.number("avg_run_time_gpu", above=0),
            row.number("med_run_time_gpu", above=0),
            row.number("avg_gpu_num", above=0),
            sum(row.number(column) for column in times),
        )

    return [sums for sums in read_all(path, columns | set(times), read) if sums.cluster != "total"]


def law_of(sums: Sums) -> Law:
    """The distribution with these sums. Raises ValueError if none of this kind has them."""
    shares = _shares(sums.mean_gpus, sums.gpus.bit_length())
    weight = sums.gpu_s / (sums.jobs * sums.mean_run_s)  # mean GPUs of a job, weighted by run time

    def weighted(growth: float) -> float:
        terms = [share * exp(growth * n) for n, share in enumerate(shares)]
        return sum(term * (1 << n) for n, term in enumerate(terms)) / sum(terms)

    growth = _root(lambda value: weighted(value) - weight, -3.0, 3.0, "GPU time")
    mean = log(sums.mean_run_s / sum(share * exp(growth * n) for n, share in enumerate(shares)))

    def below_median(sigma: float) -> float:
        mu = mean - sigma**2 / 2
        at = (log(sums.median_run_s) - mu for _ in shares)
        return sum(
            share * (1 + erf((there - growth * n) / (sigma * sqrt(2)))) / 2
            for n, (share, there) in enumerate(zip(shares, at, strict=True))
        )

    sigma = _root(lambda value: below_median(value) - 0.5, 1e-6, 10.0, "median run time")
    return Law(shares, mean - sigma**2 / 2, growth, sigma)


def _shares(mean_gpus: float, kinds: int) -> Sequence[float]:
    """Shares of the counts 1, 2, 4, …: falling by a fixed ratio, with this mean and a median of 1."""

    def falling(ratio: float, first: float | None) -> Sequence[float]:
        rest = [ratio**n for n in range(kinds)]
        if first is None:
            return [part / sum(rest) for part in rest]
        return [first, *(part * (1 - first) / sum(rest[1:]) for part in rest[1:])]

    def mean(shares: Sequence[float]) -> float:
        return sum(share * (1 << n) for n, share in enumerate(shares))

    ratio = _root(lambda value: mean(falling(value, None)) - mean_gpus, 1e-9, 1.0, "mean GPUs")
    shares = falling(ratio, None)
    if shares[0] >= 0.5:
        return shares
    ratio = _root(lambda value: mean(falling(value, 0.5)) - mean_gpus, 1e-9, 1.0, "mean GPUs")
    return falling(ratio, 0.5)


def _root(of: Callable[[float], float], low: float, high: float, name: str) -> float:
    """Root of a rising function between `low` and `high`. Raises ValueError if there is none."""
    if not of(low) <= 0 <= of(high):
        raise ValueError(f"no law of this kind has this {name}")
    return float(brentq(of, low, high, xtol=1e-15))


def generator_from(sums: Sums, path: Path) -> Generator:
    """Generator of jobs with the cluster's sums. Raises `BadFile` if no distribution has them."""
    try:
        law = law_of(sums)
    except ValueError as error:
        raise BadFile(str(path), [Problem(0, "", f"{sums.cluster}: {error}")]) from error
    rate = LOAD * sums.gpus * sums.jobs / sums.gpu_s

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, f"helios/{sums.cluster}")
        times = rng.exponential(1 / rate, JOBS).cumsum().tolist()
        kinds = rng.choice(len(law.shares), size=JOBS, p=law.shares).tolist()
        normals = rng.normal(size=JOBS).tolist()
        return [
            TraceJob(
                job_id=f"{sums.cluster}-{number}",
                submit_s=at_s,
                duration_s=min(MOST_S, max(LEAST_S, exp(law.mu + law.growth * kind + law.sigma * normal))),
                gpus=1 << kind,
            )
            for number, (at_s, kind, normal) in enumerate(zip(times, kinds, normals, strict=True))
        ]

    whole, rest = divmod(sums.gpus, GPUS_PER_NODE)
    cluster = "+".join(
        part for part in (f"{whole}x{GPUS_PER_NODE}" * bool(whole), f"1x{rest}" * bool(rest)) if part
    )
    text = f"{JOBS:,} jobs sampled with the sums that Helios' cluster {sums.cluster} published"
    return Generator(text, cluster, "constant", make)
