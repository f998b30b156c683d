"""`python -m tests.papers.default.profile_penstock`: profile `penstock` against `fifo`, `liquid`, `srtf` and
`fifo-strict`.

Run times are learned by the estimator during the run, and stops cost a save, a launch and lost work. Two
things are judged: mean job completion time against the better one of `fifo` and `liquid`, and the 99th
percentile of the time that large gangs wait, against `fifo-strict`, which lets nobody pass them.

Mixes: 600 jobs of 30 kinds by five owners on 8 × 8 GPUs. A kind has an owner, a number of GPUs and a mean run
time, spread by its logarithm from a minute to a day; its jobs differ by a third. They come at random times;
the load is 0.6 to 1.4.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from penstock.scheduling.profiles import reads_run_times
from penstock.simulator.commands.options import validate
from penstock.simulator.engine import Durations, Simulation
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import mean
from tests.papers.tables import PaperTable, Row, main
from tests.support.cli.command_line import simulate_options

PROFILES = ("fifo", "fifo-strict", "liquid", "srtf", "penstock")
TRACES = tuple(f"muri/trace{number}{suffix}" for number in range(1, 5) for suffix in ("", "_pr"))
MIX = "mix-"
CLUSTER, GPUS = "8x8", 64
RESTARTS = ("--restart-cost", "5s,20s,10m")
LARGE_GPUS = 8  # a node, or more
SEEDS = 20
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
            f"j{number},{arrivals[number]:.0f},{max(1.0, runs_s[number]):.0f},{gpus[kind]},"
            f"owner-{kind % OWNERS},kind-{kind}"
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


@simulated(Found(1.0, 1.0, 0.0))
def of(name: str, profile: str) -> Found:
    """`name`: of a trace, or `mix-SEED`."""
    with TemporaryDirectory() as folder:
        path = Path(name)
        if name.startswith(MIX):
            path = Path(folder) / f"{name}.csv"
            path.write_text(mix(int(name.removeprefix(MIX))))
        given = validate(simulate_options(str(path), "--cluster", CLUSTER, *RESTARTS))
        durations: Durations = "learned" if reads_run_times(profile) else "unknown"
        simulation = given.simulation(profile, 0, given.trace(0), durations=durations)
        while simulation.step():
            pass
        return found(simulation)


def jct_ratio(name: str) -> float:
    """Mean completion time over that of the better one of `fifo` and `liquid`."""
    return of(name, "penstock").mean_jct_s / min(of(name, other).mean_jct_s for other in ("fifo", "liquid"))


def tables() -> Iterator[PaperTable]:
    jct: list[Row] = []
    wait: list[Row] = []
    means: list[Row] = []
    for name in (*TRACES, *(f"{MIX}{seed}" for seed in range(SEEDS))):
        here = {profile: of(name, profile) for profile in PROFILES}
        means += [Row(f"{name}, {profile}", one.mean_jct_s) for profile, one in here.items()]
        jct.append(Row(name, jct_ratio(name), better="lower"))
        waits_s = here["penstock"].large_gangs_p99_wait_s, here["fifo-strict"].large_gangs_p99_wait_s
        wait.append(Row(name, waits_s[0] / max(1.0, waits_s[1]), better="lower"))
    for rows in (jct, wait):
        found, interval = mean([row.here for row in rows])
        worst = max(row.here for row in rows)
        rows.append(Row("mean", found, interval=interval, better="lower", remark=f"worst {worst:.3f}"))
    yield PaperTable("profile-means", "Mean JCT", "s", means)
    yield PaperTable(
        "profile-jct", "Profile penstock: mean JCT over the better of fifo and liquid", "times", jct
    )
    title = (
        f"Profile penstock: 99th percentile of the wait of gangs of {LARGE_GPUS} GPUs and more, over "
        "fifo-strict"
    )
    yield PaperTable("profile-waits", title, "times", wait)


if __name__ == "__main__":
    main("tests.papers.default.profile_penstock", tables)
