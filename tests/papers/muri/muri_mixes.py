"""Generated workloads for the rules of Muri's simulator: measured stage profiles, drawn GPU counts, run times
and arrivals. Seeded."""

import csv
from collections.abc import Callable
from math import exp, log
from pathlib import Path

import numpy as np

from tests.papers.muri.muri_reference import SLOWER, Job

GPUS = 64
SHARED_COUNTS = (2, 4, 8, 8, 8, 16, 32)
MEDIAN_S, SIGMA, LONGEST_S = 3_600.0, 1.6, 3e6


def mix(
    data: Path, seed: int, *, one_gpu: float, load: float, jobs: int = 300, models: int | None = None
) -> list[Job]:
    """`one_gpu`: share of jobs with one GPU; `load`: work that arrives per time, as a multiple of what 64
    GPUs do without sharing.

    Run times are log-normal, arrivals uniform. `models`: so many of the measured ones; None: all.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    with (data / "stage_profiles.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["model"] for row in rows})
    if models is not None:
        names = [str(name) for name in rng.choice(names, models, replace=False)]
    profile = {(row["model"], int(row["num_gpu"])): row for row in rows}
    drawn = []
    for _ in range(jobs):
        gpus = 1 if rng.random() < one_gpu else int(rng.choice(SHARED_COUNTS))
        row = profile[names[int(rng.integers(len(names)))], gpus]
        iteration_s = float(row["iteration_ms"]) / 1_000
        duration = min(LONGEST_S, exp(rng.normal(log(MEDIAN_S), SIGMA)))
        drawn.append((gpus, row, iteration_s, max(1, int(duration / iteration_s))))
    span = sum(gpus * iteration_s * count for gpus, _, iteration_s, count in drawn) / GPUS / load
    submits = np.sort(rng.uniform(0, span, jobs))
    return [
        Job(
            number,
            gpus,
            float(submit),
            count,
            count * iteration_s,
            iteration_s * SLOWER,
            (
                float(row["storage_cpu_ms"]) / 1_000,
                float(row["gpu_ms"]) / 1_000,
                float(row["network_ms"]) / 1_000,
            ),
            float(row["startup_overhead_s"]),
        )
        for number, (submit, (gpus, row, iteration_s, count)) in enumerate(zip(submits, drawn, strict=True))
    ]


def noisy(noise: float, seed: int) -> Callable[[Job], tuple[float, float, float, float]]:
    """Each stage's time as profiled: the truth times a factor, uniform from 1 − `noise` to 1 + `noise`;
    storage and CPU in one."""

    def profiled(job: Job) -> tuple[float, float, float, float]:
        rng = np.random.Generator(np.random.PCG64((seed, job.number)))
        storage_cpu, gpu, network = (
            time * 1_000 * factor
            for time, factor in zip(job.stages, rng.uniform(1 - noise, 1 + noise, 3), strict=True)
        )
        return storage_cpu, 0.0, gpu, network

    return profiled
