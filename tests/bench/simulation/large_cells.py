"""Profiles in large cells: events per second of the simulator, `python -m tests.bench.simulation.large_cells
[NAME …] [--steps N]`.

NAME: a cell, a profile or a load. Jobs arrive over a week, more by day than by night; run times are spread
evenly by their logarithm over four orders of magnitude, and most jobs have one GPU. Idle: a mean load of 0.9,
where few jobs wait, as in all figures of the history. Contended: of 2, where hundreds wait from the second
day on. Seconds are those of the processor. Events are arrivals and completions; a step of the simulator is
one moment. `--steps` ends a run early: its figures are those of the trace's beginning, and equal ledgers have
equal hashes.
"""

import argparse
import gc
from itertools import count
from time import process_time
from typing import NamedTuple

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.meter import Figures
from penstock.simulator.runs import no_collection
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.bench.cases import DEFAULT, HISTORY, Case

WEEK_S, DAY_S = 604_800.0, 86_400.0
SWING = 0.8  # of the rate of arrivals by day and night
IDLE, CONTENDED = 0.9, 2.0  # mean loads
GPUS = (1, 1, 1, 1, 1, 2, 2, 4, 8, 16, 32)
SPREAD = 1e4  # longest to shortest run time
CELLS = {"309x8": 4_000, "2000x8": 200_000}
PROFILES = (HISTORY, DEFAULT, "srtf", "tiresias")
LOADS = {"idle": False, "contended": True}


class Run(NamedTuple):
    """One run of the simulator."""

    figures: Figures
    steps: int
    most_waiting: int
    """Jobs in the queue after a step, at most."""
    cpu_s: float

    @property
    def events_per_s(self) -> float:
        return self.figures.events / self.cpu_s


def jobs(count: int, gpus: int, load: float) -> list[TraceJob]:
    """For a cell of so many GPUs at this mean load. The same in every run."""
    rng = np.random.Generator(np.random.PCG64(1))
    times_of_day = rng.random(2 * count) * WEEK_S
    by_day = rng.random(2 * count) * (1 + SWING) < 1 + SWING * np.sin(2 * np.pi * times_of_day / DAY_S)
    arrivals = np.sort(times_of_day[by_day][:count])
    count = len(arrivals)
    wanted = rng.choice(GPUS, count)
    times = SPREAD ** rng.random(count)
    times *= load * gpus * WEEK_S / float(np.sum(times * wanted))
    return [TraceJob(f"j{n}", float(arrivals[n]), float(times[n]), int(wanted[n])) for n in range(count)]


def measure(cluster: str, jobs_in_trace: int, case: Case, steps: int | None = None) -> Run:
    """One run, to the end of the trace or of so many steps."""
    nodes = nodes_of(cluster)
    load = CONTENDED if case.contended else IDLE
    trace = jobs(jobs_in_trace, sum(len(node.gpus) for node in nodes), load)
    run = Simulation(nodes, PlacerSettings(profile=case.profile), SteadyWork(Constant()), trace)
    most_waiting = 0
    gc.collect()
    with no_collection():
        began = process_time()
        for done in count():
            if done == steps or not run.step():
                break
            most_waiting = max(most_waiting, run.meter.waiting)
        seconds = process_time() - began
    return Run(run.figures(0, seconds), done, most_waiting, seconds)


def main(cells: dict[str, int], cases: list[Case], steps: int | None) -> None:
    for cluster, jobs_in_trace in cells.items():
        for case in cases:
            found = measure(cluster, jobs_in_trace, case, steps)
            figures = found.figures
            print(
                f"{cluster} {jobs_in_trace} jobs {case!s:<18} {found.events_per_s:>7,.0f} events/s, "
                f"{found.cpu_s:,.0f} s; {found.steps} steps, {figures.events} events, {figures.records} "
                f"records, {figures.preemptions} preemptions, at most {found.most_waiting} waiting, "
                f"{figures.unfinished_jobs} unfinished, mean JCT {figures.avg_jct_s:,.0f} s; ledger "
                f"{figures.ledger_hash}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Profiles in large cells.")
    names = ", ".join((*CELLS, *LOADS, *PROFILES))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cells, loads and profiles ({names})")
    parser.add_argument("--steps", type=int, help="of the simulator, per run; default: to the end")
    given = parser.parse_args()
    profiles = [name for name in given.names if name not in CELLS and name not in LOADS] or PROFILES
    loads = [name for name in LOADS if name in given.names] or list(LOADS)
    main(
        {c: n for c, n in CELLS.items() if c in given.names} or CELLS,
        [Case(profile, LOADS[load]) for profile in profiles for load in loads],
        given.steps,
    )
