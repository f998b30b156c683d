"""`python -m tests.simulation.cell.prelaunch_cells`: what launching early does to a busy cell: mean
completion time and makespan with it, relative to without.

12 GPUs on three nodes and 40 jobs of one to eight GPUs, some of them gangs over nodes, of two tenants; a job
launches for 15 s and saves for 4 s. Single runs differ by a tenth, since each start changes all that follow:
the means are over seeds, with an interval of 95 % (bootstrap).
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from penstock.model.nouns.settings import PlacerSettings, Stage
from penstock.simulator.engine import Durations, Options, Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.sharing import Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.meter import Figures
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock.text.counting import count
from tests.papers.resampling import less

JOBS = 40
SEEDS = 64
LAUNCH_S, SAVE_S = 15.0, 4.0


class Cell(NamedTuple):
    """What the placer goes by."""

    profile: str
    durations: Durations
    without: tuple[Stage, ...] = ()


PROFILES: Sequence[tuple[str, tuple[Stage, ...]]] = (
    ("penstock", ()),
    ("penstock", ("groups",)),
    ("liquid", ()),
)
CELLS = [
    Cell(profile, durations, without) for profile, without in PROFILES for durations in get_args(Durations)
]


def busy(seed: int) -> Sequence[TraceJob]:
    """More than 12 GPUs can take at once; some are gangs over nodes."""
    rng = np.random.default_rng(seed)
    jobs, at_s = [], 0.0
    for number in range(JOBS):
        at_s += float(rng.exponential(20))
        gpus = int(rng.choice([1, 1, 1, 2, 2, 4, 8]))
        jobs.append(
            TraceJob(
                job_id=f"j{number}",
                submit_s=at_s,
                duration_s=float(rng.uniform(5, 200)),
                gpus=gpus,
                model=f"m{number % 3}",
                batch_size=8,
                owner=f"u{number % 2}",
                iterations=int(rng.integers(50, 500)),
                workers=gpus if gpus > 1 and rng.random() < 0.3 else None,
            )
        )
    return jobs


def run(
    seed: int,
    cell: Cell,
    *,
    prelaunch: bool,
    restarts: bool = False,
    checked: bool = True,
    timeline: Timeline | None = None,
) -> Figures:
    """`restarts`: stops and starts after them cost something; `checked`: invariants are checked after each
    record; `timeline`: takes all records."""
    model = Phases(Constant(), LAUNCH_S, SAVE_S)
    work = RestartingWork(model, lambda job: RestartCost(2.0, 5.0)) if restarts else SteadyWork(model)
    settings = PlacerSettings(profile=cell.profile, prelaunch_wait_ms=20_000, without=cell.without)
    options = Options(durations=cell.durations, prelaunch=prelaunch, check_every_step=checked)
    take = None if timeline is None else timeline.take
    simulation = Simulation(nodes_of("3x4"), settings, work, busy(seed), options, take)
    while simulation.step():
        pass
    return simulation.figures(1, 1)


def main(seeds: int = SEEDS) -> None:
    table = Table(title=f"Less with launches before GPUs are free, %, {count(seeds, 'seed')}")
    for column in (
        "profile",
        "without",
        "run times",
        "mean completion time",
        "makespan",
        "launched early",
        "in vain",
    ):
        table.add_column(column)
    for cell in CELLS:
        timelines = [Timeline() for _ in range(seeds)]
        early = [
            run(seed, cell, prelaunch=True, checked=False, timeline=one) for seed, one in enumerate(timelines)
        ]
        late = [run(seed, cell, prelaunch=False, checked=False) for seed in range(seeds)]
        texts = []
        for name in ("avg_jct_s", "makespan_s"):
            here, interval = less(*([getattr(one, name) for one in runs] for runs in (early, late)))
            texts.append(
                f"{here:.1f}" + ("" if interval is None else f" ({interval[0]:.1f} to {interval[1]:.1f})")
            )
        launched = sum(one.prelaunches for one in timelines)
        vain = sum(one.given_back for one in timelines) / max(1, launched)
        table.add_row(
            cell.profile,
            ", ".join(cell.without),
            cell.durations,
            *texts,
            f"{launched / seeds / JOBS:.2f} per job",
            f"{vain:.1%}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
