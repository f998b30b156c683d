"""Preemptive profiles in large cells: events per second of the simulator, `python -m tests.bench.large_cells [JOBS] [PROFILE …]`.

Jobs arrive over a week, more by day than by night, and keep the cell at a mean load of 0.9; run times are spread evenly by their logarithm over four
orders of magnitude, and most jobs have one GPU. Seconds are those of the processor. Events are arrivals and completions.
"""

import gc
import sys
from time import process_time

import numpy as np

from penstock.model.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob

WEEK_S, DAY_S = 604_800.0, 86_400.0
SWING = 0.8  # of the rate of arrivals by day and night, so that jobs have to wait
LOAD = 0.9
GPUS = (1, 1, 1, 1, 1, 2, 2, 4, 8, 16, 32)
SPREAD = 1e4  # longest to shortest run time
CELLS = {"309x8": 4_000, "2000x8": 200_000}
PROFILES = ("srtf", "tiresias", "liquid")


def jobs(count: int, gpus: int) -> list[TraceJob]:
    """For a cell of so many GPUs. The same in every run."""
    rng = np.random.Generator(np.random.PCG64(1))
    times_of_day = rng.random(2 * count) * WEEK_S
    by_day = rng.random(2 * count) * (1 + SWING) < 1 + SWING * np.sin(2 * np.pi * times_of_day / DAY_S)
    arrivals = np.sort(times_of_day[by_day][:count])
    count = len(arrivals)
    wanted = rng.choice(GPUS, count)
    times = SPREAD ** rng.random(count)
    times *= LOAD * gpus * WEEK_S / float(np.sum(times * wanted))
    return [TraceJob(f"j{n}", float(arrivals[n]), float(times[n]), int(wanted[n])) for n in range(count)]


def main(profiles: list[str], cells: dict[str, int]) -> None:
    for cluster, count in cells.items():
        nodes = nodes_of(cluster)
        trace = jobs(count, sum(len(node.gpus) for node in nodes))
        for profile in profiles:
            gc.collect()
            run = Simulation(nodes, PlacerSettings(profile=profile), SteadyWork(Constant()), trace)
            began = process_time()
            while run.step():
                pass
            seconds = process_time() - began
            found = run.figures(0, seconds)
            print(
                f"{cluster} {count} jobs {profile:<10} {found.events / seconds:>7,.0f} events/s, {seconds:,.0f} s; "
                f"{found.preemptions} preemptions, {found.unfinished_jobs} unfinished, mean JCT {found.avg_jct_s:,.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        [name for name in given if name not in CELLS] or list(PROFILES),
        {c: n for c, n in CELLS.items() if c in given} or CELLS,
    )
