"""The simulator through the real placer core: time per event, and what ten times the jobs make of it.

Every job is there at the start, so nearly all of them wait: ten times the jobs are a queue ten times as long.
A policy that looks at all who wait would take ten times as long for each event. Events are arrivals and
completions; seconds are those of the processor; both sizes are run in turn in one process, and the best of
each counts.
"""

import gc
from time import process_time

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob

PROFILES = ("fifo", "liquid", "srtf", "srsf", "tiresias")
CLUSTER = "8x8"
GPUS = (1, 1, 1, 1, 2, 2, 4, 8, 16)
SHORTEST_S, LONGEST_S = 60.0, 86_400.0
TIMES = 10


def jobs(count: int) -> list[TraceJob]:
    """All at once; run times between a minute and a day, evenly by their logarithm. The same in every run."""
    rng = np.random.Generator(np.random.PCG64(1))
    spread = np.log(LONGEST_S / SHORTEST_S)
    return [
        TraceJob(f"j{number}", 0.0, float(SHORTEST_S * np.exp(rng.random() * spread)), int(rng.choice(GPUS)))
        for number in range(count)
    ]


def us_per_event(profile: str, trace: list[TraceJob]) -> float:
    """One whole run, µs of processor time per event; every job ends."""
    run = Simulation(nodes_of(CLUSTER), PlacerSettings(profile=profile), SteadyWork(Constant()), trace)
    gc.collect()
    began = process_time()
    while run.step():
        pass
    seconds = process_time() - began
    found = run.figures(0, seconds)
    assert found.finished_jobs == len(trace), (profile, found.unfinished_jobs)
    return seconds / found.events * 1e6


def measure(profile: str, count: int, repeats: int) -> tuple[float, float]:
    """(events/s with `count` jobs, time per event with ten times as many as a multiple)."""
    few, many = jobs(count), jobs(TIMES * count)
    small, large = [], []
    for _ in range(repeats):
        small += [us_per_event(profile, few) for _ in range(TIMES // 2)]
        large.append(us_per_event(profile, many))
    return 1e6 / min(small), min(large) / min(small)


def main() -> None:
    for profile in PROFILES:
        per_s, ratio = measure(profile, 1_000, 1)
        print(f"{profile:<10} {per_s:>8,.0f} events/s; {TIMES} times the jobs: {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
