"""SpeCon's four schedules through the real engine, beside §VI-B and §VI-C: `python -m
tests.papers.specon.specon_tables`.

Jobs, curves and nodes are those of `penstock_papers.generators.specon`; a move saves and restores in 5 s
together (§III-C measured less). The baseline is the source's: the same first placement, evenly spread, and no
migration; of the default profile that profile without its stage `moves`. Intervals: 95 % over seeds,
resampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.model.nouns.settings import Convergence, Stage
from penstock.simulator.commands.options import validate
from penstock.simulator.engine import Simulation
from penstock.simulator.traces.files.importing import Trace
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import less
from tests.papers.tables import PaperTable, Row, main
from tests.support.cli.command_line import simulate_options

SEEDS = 20
RESTART_COST = "2500ms,2500ms,0s"
BASELINE = "even"
NOT_WORSE = -0.1
"""Reduction of the average that the default profile's moves have to reach, %: never worse than without them,
but for a thousandth."""
PROFILES = {"specon": "SpeCon as published", "balance": "By predicted completion times"}


class Published(NamedTuple):
    """Reductions in percent. Source: SpeCon §VI-B, §VI-C2, §VI-D."""

    average: float
    makespan: float
    best: float | None = None


WITHOUT: Mapping[str, tuple[float | None, float]] = {
    "fixed": (275.2, 1_260.0),
    "random-20": (None, 1_421.0),
    "random-30": (865.7, 1_760.0),
    "random-50": (596.3, 2_070.0),
}
"""Average completion time and makespan without migration, s. Source: SpeCon §VI-B, §VI-C2, §VI-D."""
SCHEDULES: Mapping[str, Published] = {
    "fixed": Published(14.7, 5.6, 37.6),
    "random-20": Published(13.6, 24.7, 31.6),
    "random-30": Published(7.6, 14.8, 28.8),
    "random-50": Published(7.2, 11.1, 41.5),
}
PARAMETERS: Mapping[tuple[float, int], Published] = {
    (0.05, 20): Published(5.7, 6.1, 29.1),
    (0.05, 25): Published(6.8, 7.5, 27.8),
    (0.05, 30): Published(3.2, 4.0, 21.3),
    (0.01, 30): Published(9.6, 8.2, 31.0),
    (0.1, 30): Published(6.4, 3.1, 23.9),
}
"""α and interval in s. Source: SpeCon table III."""


class Outcome(NamedTuple):
    """Of one run, s: completion time of each job by id, and the makespan."""

    jct_s: Mapping[str, float]
    makespan_s: float
    moves: int


@cache
def jobs_of(schedule: str, seed: int) -> Trace:
    return validate(simulate_options(f"specon/{schedule}")).trace(seed)


@simulated(Outcome({"a": 1.0}, 1.0, 0))
def run(
    schedule: str,
    profile: str,
    seed: int,
    convergence: Convergence = Convergence(),  # noqa: B008 - immutable
    restart_cost: str = RESTART_COST,
    without: tuple[Stage, ...] = (),
) -> Outcome:
    given = validate(simulate_options(f"specon/{schedule}", "--restart-cost", restart_cost))
    jobs = jobs_of(schedule, seed)
    settings = msgspec.structs.replace(
        given.settings(profile, seed), convergence=convergence, without=without
    )
    work = given.work(seed, jobs, settings)
    simulation = Simulation(given.cluster.under(seed), settings, work, jobs.jobs, given.options)
    moves: dict[str, int] = {}
    state, seq = simulation.cell.state, 0
    while simulation.step():
        if state.seq != seq:
            seq = state.seq
            moves |= {job.job_id: job.moves.migrations for job in state.holding.values()}
    figures = simulation.figures(0, 0)
    assert figures.unfinished_jobs == 0
    jct_s = {job_id: life.jct_s for job_id, life in simulation.meter.lives.items()}
    return Outcome(jct_s, figures.makespan_s, sum(moves.values()))


def rows(
    label: str, ours: Sequence[Outcome], theirs: Sequence[Outcome], published: Published | None, reach: bool
) -> Iterator[Row]:
    for what, of in (("average", mean_s), ("makespan", makespan_s)):
        here, interval = less([of(one) for one in ours], [of(one) for one in theirs])
        value = None if published is None else getattr(published, what)
        remark = ""
        if what == "average":
            faster = np.mean(
                [
                    one.jct_s[job] < other.jct_s[job] - 1e-6
                    for one, other in zip(ours, theirs, strict=True)
                    for job in one.jct_s
                ]
            )
            remark = (
                f"{100 * faster:.0f} % of jobs faster; {np.mean([one.moves for one in ours]):.1f} moves per "
                "run"
            )
        yield Row(f"{label}: {what}", here, value, interval, value if reach else None, remark=remark)
    pairs = list(zip(ours, theirs, strict=True))
    best = [max(100 * (1 - one.jct_s[job] / other.jct_s[job]) for job in one.jct_s) for one, other in pairs]
    value = None if published is None else published.best
    yield Row(f"{label}: best job", float(np.mean(best)), value, reach=value if reach else None)
    worst = min(100 * (1 - mean_s(one) / mean_s(other)) for one, other in pairs)
    yield Row(f"{label}: average of the worst run", worst, reach=0.0 if reach else None)


def mean_s(one: Outcome) -> float:
    return fmean(one.jct_s.values())


def makespan_s(one: Outcome) -> float:
    return one.makespan_s


def moves_of_the_default() -> PaperTable:
    """What the default profile's moves bring, and whether its average is ever worse with them."""
    found: list[Row] = []
    for name in SCHEDULES:
        ours = [run(name, "penstock", seed) for seed in range(SEEDS)]
        unmoved = [run(name, "penstock", seed, without=("moves",)) for seed in range(SEEDS)]
        average, *others = rows(name, ours, unmoved, None, reach=False)
        found += [average._replace(reach=NOT_WORSE), *others]
    return PaperTable(
        "penstock-moves", "The default profile against itself without moves: reductions", "% less", found
    )


def tables() -> Iterator[PaperTable]:
    seeds = range(SEEDS)
    base = {name: [run(name, BASELINE, seed) for seed in seeds] for name in SCHEDULES}
    found: list[Row] = []
    for name, (average_s, whole_s) in WITHOUT.items():
        found.append(Row(f"{name}: average", float(np.mean([mean_s(one) for one in base[name]])), average_s))
        found.append(
            Row(f"{name}: makespan", float(np.mean([makespan_s(one) for one in base[name]])), whole_s)
        )
    yield PaperTable("specon-baseline", "Without migration", "s", found)
    for profile, title in PROFILES.items():
        found = []
        for name, published in SCHEDULES.items():
            ours = [run(name, profile, seed) for seed in seeds]
            found += rows(name, ours, base[name], published, reach=profile == "balance")
        yield PaperTable(profile, f"{title} against no migration: reductions", "% less", found)
    found = []
    for name in SCHEDULES:
        free = [run(name, "balance", seed, restart_cost="0s,0s,0s") for seed in seeds]
        found += rows(name, free, base[name], None, reach=False)
    yield PaperTable(
        "balance-bound",
        "The same where moves cost nothing: what more moves could bring",
        "% less",
        found,
        "Under proportional sharing a move only evens out loads: it ends where all nodes are equally busy.",
    )
    yield moves_of_the_default()
    found = []
    base_one = [run("random-20-one", BASELINE, seed) for seed in seeds]
    for (alpha, interval_s), published in PARAMETERS.items():
        convergence = Convergence(alpha=alpha, interval_ms=1_000 * interval_s)
        ours = [run("random-20-one", "specon", seed, convergence) for seed in seeds]
        found += rows(f"α {alpha:g}, {interval_s} s", ours, base_one, published, reach=False)
    yield PaperTable(
        "specon-parameters", "SpeCon's threshold and interval (table III): reductions", "% less", found
    )


if __name__ == "__main__":
    main("tests.papers.specon.specon_tables", tables)
