"""`coda/month`, `coda/3-days`: a month of training and CPU jobs after the published figures of CODA's cluster
(HPCA '21, §III, §VI).

From the source: 80 nodes with 5 GPUs and 28 cores; 25,000 training and 75,000 CPU jobs in 30 days; twenty
users, of which 15 – 20 submit CPU jobs only; 68.5 % of the trainings run for more than an hour and 39.6 % for
more than two; 76.1 % ask for one or two cores, 15.3 % for more than ten; the use of GPUs is steady, that of
cores goes by day and night and reaches 100 % at peaks; 0.5 % of the CPU jobs have a high demand for memory
bandwidth. The source gives no trace, so the rest is assumed:
- run times of trainings are log-uniform below one hour and between one and two, and fall off as a power of
  `TAIL` beyond, up to five days; those that had come before and still run are there at the start, beside the
  25,000;
- trainings have 1, 2, 4 or 5 GPUs (`GPUS`); `TAIL` and `GPUS` are chosen so that first come, first served
  holds about as many GPUs as published (83.5 %);
- one or two cores are per GPU (§VI-D has them so), other requests of the whole job, of no fewer than one per
  GPU and at most a node's; the model is sampled evenly from Synergy's twelve;
- trainings come evenly; the rate of CPU jobs swings by `SWING` of its mean within a day, and half of them
  come in bursts of one user, `BURST` jobs on average within ten minutes;
- CPU jobs ask for 1 – 16 cores (`CPU_CORES`) and run for `CPU_RUN_S` in the median, log-normal with a
  deviation of one;
- a CPU job of high demand takes 50 – 100 % of a node's memory bandwidth, any other as large a part of it as
  half its part of the cores; a training 2 % per GPU.
"""

from collections.abc import Sequence
from math import exp, log, pi, sin

import numpy as np

from penstock.simulator.generators.base import HOUR_S, Family, Generator, rng_of
from penstock.simulator.job_models.sharing import SENSITIVITY
from penstock.simulator.traces.jobs import TraceJob

NODES, GPUS_PER_NODE, CORES_PER_NODE = 80, 5, 28
MODELS = tuple(sorted(SENSITIVITY))
GPU_TRAFFIC = 0.02
USERS, WITH_GPUS = 20, 14
DAY_S = 86_400.0
GPU_JOBS_PER_DAY, CPU_JOBS_PER_DAY = 25_000 / 30, 75_000 / 30
UP_TO_1_H, UP_TO_2_H = 1 - 0.685, 1 - 0.396
SHORTEST_S, LONGEST_S = 60.0, 5 * DAY_S
TAIL = 1.15
GPUS, OF_GPU_JOBS = (1, 2, 4, 5), (0.38, 0.18, 0.39, 0.05)
FEW, SOME, MANY = 0.761, 0.086, 0.153
SWING = 0.6
BURST, BURST_S = 40, 600.0
CPU_CORES, OF_CPU_JOBS = (1, 2, 4, 8, 16), (0.30, 0.25, 0.25, 0.15, 0.05)
CPU_RUN_S = 4500.0
HIGH_DEMAND = 0.005


def coda_month(days: int) -> Generator:
    """The generator for this number of days, ≥ 1."""
    jobs = round(days * (GPU_JOBS_PER_DAY + CPU_JOBS_PER_DAY))
    return Generator(
        f"CODA's cluster for {days} days: {jobs:,} jobs, a quarter of them training",
        f"{NODES}x{GPUS_PER_NODE}x{CORES_PER_NODE}",
        "bandwidth(cpu)",
        lambda seed: make(seed, days),
    )


def make(seed: int, days: int) -> Sequence[TraceJob]:
    rng = rng_of(seed, f"coda/{days}-days")
    span_s = days * DAY_S
    jobs = [_training(rng, rng.uniform(0.0, span_s)) for _ in range(round(days * GPU_JOBS_PER_DAY))]
    jobs += _running(rng)
    jobs += _cpu_jobs(rng, days)
    jobs.sort(key=lambda job: job.submit_s)
    return [job._replace(job_id=f"coda-{place}") for place, job in enumerate(jobs)]


def _running(rng: np.random.Generator) -> list[TraceJob]:
    """Trainings that came before and would still run if all had started at once,
    with their remaining run time."""
    before = [
        _training(rng, -rng.uniform(0.0, LONGEST_S))
        for _ in range(round(LONGEST_S / DAY_S * GPU_JOBS_PER_DAY))
    ]
    return [
        job._replace(submit_s=0.0, duration_s=job.submit_s + job.duration_s)
        for job in before
        if job.submit_s + job.duration_s > 1.0
    ]


def _training(rng: np.random.Generator, at_s: float) -> TraceJob:
    gpus = _one_of(rng, GPUS, OF_GPU_JOBS)
    kind = rng.random()
    if kind < FEW:
        cores = gpus * int(rng.integers(1, 3))
    else:
        cores = int(rng.integers(3, 11) if kind < FEW + SOME else rng.integers(11, 21))
    return TraceJob(
        job_id="",
        submit_s=at_s,
        duration_s=_run_s(float(rng.random())),
        gpus=gpus,
        model=MODELS[int(rng.integers(len(MODELS)))],
        owner=f"user-{1 + int(rng.integers(WITH_GPUS))}",
        cores=max(gpus, cores),
        memory_bandwidth=GPU_TRAFFIC * gpus,
    )


def _one_of(rng: np.random.Generator, values: Sequence[int], parts: Sequence[float]) -> int:
    """Samples one of the values with the given probabilities."""
    place = rng.random()
    for value, part in zip(values, parts, strict=True):
        place -= part
        if place < 0:
            return value
    return values[-1]


def _run_s(place: float) -> float:
    """Run time of a training by its place among all, 0 – 1."""
    if place < UP_TO_1_H:
        return _between(SHORTEST_S, HOUR_S, place / UP_TO_1_H)
    if place < UP_TO_2_H:
        return _between(HOUR_S, 2 * HOUR_S, (place - UP_TO_1_H) / (UP_TO_2_H - UP_TO_1_H))
    left = (1 - place) / (1 - UP_TO_2_H)
    return min(LONGEST_S, 2 * HOUR_S * left ** (-1 / TAIL)) if left > 0 else LONGEST_S


def _between(low: float, high: float, part: float) -> float:
    return exp(log(low) + part * (log(high) - log(low)))


def _cpu_jobs(rng: np.random.Generator, days: int) -> list[TraceJob]:
    """Half of them in bursts of one user."""
    count = round(days * CPU_JOBS_PER_DAY)
    found: list[TraceJob] = []
    while len(found) < count:
        at_s = _moment(rng, days)
        user = f"user-{1 + int(rng.integers(USERS))}"
        size = 1 + int(rng.geometric(1 / BURST)) if rng.random() < 1 / (1 + BURST) else 1
        for _ in range(min(size, count - len(found))):
            after_s = float(rng.uniform(0.0, BURST_S)) if size > 1 else 0.0
            found.append(_cpu_job(rng, user, at_s + after_s))
    return found


def _moment(rng: np.random.Generator, days: int) -> float:
    """A time of arrival, by rejection from the rate of the day."""
    while True:
        at_s = float(rng.uniform(0.0, days * DAY_S))
        if rng.random() * (1 + SWING) < 1 + SWING * sin(2 * pi * at_s / DAY_S):
            return at_s


def _cpu_job(rng: np.random.Generator, user: str, at_s: float) -> TraceJob:
    cores = _one_of(rng, CPU_CORES, OF_CPU_JOBS)
    traffic = 0.5 * cores / CORES_PER_NODE
    if rng.random() < HIGH_DEMAND:
        traffic = float(rng.uniform(0.5, 1.0))
    return TraceJob(
        job_id="",
        submit_s=at_s,
        duration_s=max(1.0, float(rng.lognormal(log(CPU_RUN_S), 1.0))),
        gpus=0,
        owner=user,
        cores=cores,
        memory_bandwidth=traffic,
    )


CODA = Family({"coda/month": coda_month(30), "coda/3-days": coda_month(3)})
