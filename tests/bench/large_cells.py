"""Preemptive profiles in large cells: events per second of the simulator, `python -m tests.bench.large_cells [CELL …] [PROFILE …] [--steps N]`.

Jobs arrive over a week, more by day than by night, and keep the cell at a mean load of 0.9; run times are spread evenly by their logarithm over four
orders of magnitude, and most jobs have one GPU. Seconds are those of the processor. Events are arrivals and completions; a step of the
simulator is one moment. `--steps` ends a run early: its figures are those of the trace's beginning, and equal ledgers have equal hashes.
"""

import argparse
import gc
from itertools import count
from time import process_time

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.runs import no_collection
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


def main(profiles: list[str], cells: dict[str, int], steps: int | None) -> None:
    for cluster, jobs_in_trace in cells.items():
        nodes = nodes_of(cluster)
        trace = jobs(jobs_in_trace, sum(len(node.gpus) for node in nodes))
        for profile in profiles:
            gc.collect()
            run = Simulation(nodes, PlacerSettings(profile=profile), SteadyWork(Constant()), trace)
            with no_collection():
                began = process_time()
                for done in count():
                    if done == steps or not run.step():
                        break
                seconds = process_time() - began
            found = run.figures(0, seconds)
            print(
                f"{cluster} {jobs_in_trace} jobs {profile:<10} {found.events / seconds:>7,.0f} events/s, {seconds:,.0f} s; "
                f"{done} steps, {found.events} events, {found.records} records, {found.preemptions} preemptions, "
                f"{found.unfinished_jobs} unfinished, mean JCT {found.avg_jct_s:,.0f} s; ledger {found.ledger_hash}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Preemptive profiles in large cells.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cells ({', '.join(CELLS)}) and profiles")
    parser.add_argument("--steps", type=int, help="of the simulator, per run; default: to the end")
    given = parser.parse_args()
    main(
        [name for name in given.names if name not in CELLS] or list(PROFILES),
        {c: n for c, n in CELLS.items() if c in given.names} or CELLS,
        given.steps,
    )
