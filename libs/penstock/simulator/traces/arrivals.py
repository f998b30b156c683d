"""Arrivals of jobs that never end until the cluster is full, to measure the fragmentation of a packing.

Source: the evaluation of the openb traces. Its rules: a seeded permutation of the jobs, then single ones
sampled with replacement, until they ask for more than the cluster has; one job a second; a job that finds no
place at once is dropped, but counts as arrived. The result of such a run is `Figures.full_load_allocation`.
"""

from collections.abc import Sequence

import numpy as np

from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.simulator.traces.jobs import TraceJob

UNTIL = 1.01
"""Demand of all jobs in the end, relative to the cluster's GPUs. The figure at 100 % needs no more."""
APART_S = 1.0
PATIENCE_S = 0.001  # long enough for one try: the ledger counts whole milliseconds
MAX_ARRIVALS = 1_000_000


def fill(jobs: Sequence[TraceJob], gpus: int, seed: int, until: float = UNTIL) -> Sequence[TraceJob]:
    """The jobs in a seeded order, then sampled again, until they ask for more than `until` of `gpus`.

    Jobs sampled again are named `<job>.2`, `<job>.3`, … Raises ValueError if the jobs ask for no GPU at all.
    """
    if not any(job.gpus for job in jobs):
        raise ValueError("no job asks for a GPU: a cluster cannot be filled with them")
    rng = np.random.default_rng(seed)
    arrivals: list[TraceJob] = []
    times = [0] * len(jobs)
    asked = 0.0
    for index in rng.permutation(len(jobs)).tolist():
        if asked > until * gpus:
            return arrivals
        asked += _sample(arrivals, times, jobs, index)
    while asked <= until * gpus and len(arrivals) < MAX_ARRIVALS:
        asked += _sample(arrivals, times, jobs, int(rng.integers(len(jobs))))
    return arrivals


def _sample(arrivals: list[TraceJob], times: list[int], jobs: Sequence[TraceJob], index: int) -> float:
    """Appends one arrival; returns the GPUs that it asks for."""
    times[index] += 1
    job = jobs[index]
    name = job.job_id if times[index] == 1 else f"{job.job_id}.{times[index]}"
    if len(name) > MAX_JOB_ID_CHARS:
        name = f"again-{index}.{times[index]}"
    arrival = job._replace(
        job_id=name, submit_s=len(arrivals) * APART_S, duration_s=0.0, patience_s=PATIENCE_S, stages=None
    )
    arrivals.append(arrival)
    return arrival.whole_gpus
