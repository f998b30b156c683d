"""`python -m tests.papers.profile_penstock [--quick]`: profile `penstock` against `fifo`, `liquid`, `srtf` and `fifo-strict`.

Run times are learned by the estimator during the run, and stops cost a save, a launch and lost work. Two things are judged: mean job completion time against the better one of
`fifo` and `liquid`, and the 99th percentile of the time that large gangs wait, against `fifo-strict`, which lets nobody pass them.

Mixes: 600 jobs of 30 kinds by five owners on 8 × 8 GPUs. A kind has an owner, a number of GPUs and a mean run time, spread by its logarithm from a minute to a day; its jobs differ by a third.
They come at random times; the load is 0.6 to 1.4.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from penstock.policies.profiles import READ_DURATIONS
from penstock.simulator.commands.options import judge
from penstock.simulator.engine import Simulation
from tests.support.command_line import simulate_options

PROFILES = ("fifo", "fifo-strict", "liquid", "srtf", "penstock")
TRACES = ("trace1", "trace1_pr", "trace2", "trace2_pr", "trace3", "trace3_pr", "trace4", "trace4_pr")
QUICK = ("trace3", "trace3_pr")
CLUSTER, GPUS = "8x8", 64
RESTARTS = ("--restart-cost", "5s,20s,10m")
LARGE_GPUS = 8  # a node, or more
SEEDS, QUICK_SEEDS = 20, 4
KINDS, JOBS, OWNERS = 30, 600, 5
SIZES = (1, 1, 1, 2, 4, 8, 8, 16)
SHORTEST_S, LONGEST_S = 60.0, 86_400.0
SPREAD = 1 / 3


class Found(NamedTuple):
    """Of one trace under one profile, in seconds."""

    mean_jct_s: float
    large_gangs_p99_wait_s: float
    restarts_per_job: float


def mix(seed: int) -> str:
    """A trace as CSV."""
    rng = np.random.Generator(np.random.PCG64(seed))
    gpus = rng.choice(SIZES, KINDS)
    means_s = np.exp(rng.uniform(np.log(SHORTEST_S), np.log(LONGEST_S), KINDS))
    kinds = rng.integers(0, KINDS, JOBS)
    runs_s = means_s[kinds] * np.exp(rng.normal(0, SPREAD, JOBS))
    load = rng.uniform(0.6, 1.4)
    span_s = float(np.sum(runs_s * gpus[kinds])) / (GPUS * load)
    arrivals = np.sort(rng.uniform(0, span_s, JOBS))
    lines = ["job_id,submit_s,duration_s,gpus,owner,model"]
    for number, kind in enumerate(kinds):
        lines.append(
            f"j{number},{arrivals[number]:.0f},{max(1.0, runs_s[number]):.0f},{gpus[kind]},owner-{kind % OWNERS},kind-{kind}"
        )
    return "\n".join(lines) + "\n"


def found(simulation: Simulation) -> Found:
    figures = simulation.figures(0, 0)
    assert figures.unfinished_jobs == 0
    waits = [
        life.jct_s - life.ran_s for life in simulation.meter.lives.values() if life.job.gpus >= LARGE_GPUS
    ]
    return Found(
        figures.avg_jct_s, float(np.quantile(waits, 0.99)) if waits else 0.0, figures.restarts_per_job
    )


def compared(path: Path) -> dict[str, Found]:
    given = judge(simulate_options(str(path), "--cluster", CLUSTER, *RESTARTS))
    trace = given.trace(0)
    by_profile = {}
    for profile in PROFILES:
        simulation = given.simulation(
            profile, 0, trace, durations="learned" if profile in READ_DURATIONS else "unknown"
        )
        while simulation.step():
            pass
        by_profile[profile] = found(simulation)
    return by_profile


def all_compared(traces: tuple[str, ...], seeds: int) -> Iterator[tuple[str, dict[str, Found]]]:
    for trace in traces:
        yield trace, compared(Path(f"muri/{trace}"))
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            path = Path(folder) / f"mix-{seed}.csv"
            path.write_text(mix(seed))
            yield path.stem, compared(path)


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    jct: list[float] = []
    wait: list[float] = []
    print(f"{'':<10}" + "".join(f"{profile:>14}" for profile in PROFILES) + "   JCT ratio   gang wait ratio")
    for name, by_profile in all_compared(QUICK if quick else TRACES, QUICK_SEEDS if quick else SEEDS):
        ours = by_profile["penstock"]
        jct.append(ours.mean_jct_s / min(by_profile[other].mean_jct_s for other in ("fifo", "liquid")))
        wait.append(ours.large_gangs_p99_wait_s / max(1.0, by_profile["fifo-strict"].large_gangs_p99_wait_s))
        row = "".join(f"{by_profile[profile].mean_jct_s:>14,.0f}" for profile in PROFILES)
        print(f"{name:<10}{row}   {jct[-1]:>9.3f}   {wait[-1]:>15.3f}", flush=True)
    print(f"mean JCT against the better of fifo and liquid: mean {mean(jct):.3f}, worst {max(jct):.3f}")
    print(
        f"p99 wait of gangs of {LARGE_GPUS} GPUs and more against fifo-strict: mean {mean(wait):.3f}, worst {max(wait):.3f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
