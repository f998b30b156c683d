"""Profile `penstock` on the workloads of Liquid, SpeCon, GENIE, Muri and CODA, beside each paper's own
policy: `python -m tests.papers.default.composed_tables`.

A figure is how many times better `penstock` is than the policy of the paper, in the paper's own measure; it
has to reach 0.98 everywhere, and to be above 1.05 on three workloads. The ablation leaves out one stage after
the other (`PlacerSettings.without`) on the workload on which it matters. Intervals: 95 % over seeds,
resampled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, get_args

import numpy as np

from penstock.model.nouns.settings import Contention, Stage
from penstock.simulator.engine import Durations
from tests.papers.coda import coda_workload
from tests.papers.genie import genie_tables
from tests.papers.liquid import liquid_tables
from tests.papers.muri import muri_tables
from tests.papers.resampling import Interval, ratio
from tests.papers.specon import specon_tables
from tests.papers.tables import PaperTable, Row, main

SEEDS, ABLATED_SEEDS = 20, 4
LEAST, MORE, WORKLOADS_WITH_MORE = 0.98, 1.05, 3
OURS = "penstock"
NAMED_CORES = (
    ("as it is", None),
    ("with users_cores: respect", Contention(users_cores="respect")),
    ("with users_cores: override", Contention(users_cores="override")),
)
Measure = Callable[[str, int, tuple[Stage, ...]], float]
"""(profile, seed, stages left out) → a figure, > 0."""


class Workload(NamedTuple):
    """One measure of one workload."""

    paper: str
    label: str
    own: str
    measure: Measure
    higher_is_better: bool = False
    seeds: int = SEEDS
    """1: there is nothing random in it."""
    ablated: bool = True
    """False: not on this workload."""


def _liquid(trace: str, which: int, *, batch: bool) -> Measure:
    return lambda profile, seed, without: liquid_tables.run(
        trace, profile, seed, batch=batch, without=without
    )[which]


def _specon(schedule: str, of: Callable[[specon_tables.Outcome], float]) -> Measure:
    return lambda profile, seed, without: of(specon_tables.run(schedule, profile, seed, without=without))


def _genie(per_hour: int) -> Measure:
    return lambda profile, seed, without: (
        genie_tables.run(per_hour, "qos", seed, profile=profile, without=without).met
    )


def _muri(trace: str, first: int | None = None, durations: Durations = "known") -> Measure:
    return lambda profile, _seed, without: (
        muri_tables.simulate(trace, profile, first=first, without=without, durations=durations).avg_jct_s
    )


def _coda(cores: coda_workload.Cores, of: Callable[[coda_workload.Outcome], float]) -> Measure:
    return lambda profile, seed, without: of(coda_workload.run(profile, cores, seed, without))


def trainings_s(found: coda_workload.Outcome) -> float:
    return found.trainings_s


def cpu_jobs_s(found: coda_workload.Outcome) -> float:
    return found.cpu_jobs_s


def _coda_rows() -> Iterator[Workload]:
    """Completion times, and what the source promises of queueing (§VI-C)."""
    measures: tuple[tuple[str, Callable[[coda_workload.Outcome], float], bool], ...] = (
        ("mean JCT of trainings", trainings_s, False),
        ("mean JCT of CPU jobs", cpu_jobs_s, False),
        ("trainings that start at once", lambda found: found.at_once, True),
        ("CPU jobs that start within 3 min", lambda found: found.in_3_min, True),
    )
    rows: tuple[coda_workload.Cores, ...] = ("known", "searched")
    for cores in rows:
        for what, of, higher in measures:
            label = f"cores {cores}{' for' if cores == 'searched' else ''}, {what}"
            yield Workload("CODA", label, "coda", _coda(cores, of), higher, ablated=cores == "searched")


WORKLOADS = (
    Workload("Muri", "trace3, mean JCT", "muri-s", _muri("trace3"), seeds=1),
    Workload(
        "Muri",
        "trace3, run times not known, mean JCT",
        "muri-l",
        _muri("trace3", durations="unknown"),
        seeds=1,
    ),
    Workload(
        "Muri",
        "trace1, first 300 jobs, run times not known, mean JCT",
        "muri-l",
        _muri("trace1", 300, "unknown"),
        seeds=1,
        ablated=False,
    ),
    Workload(
        "Muri", "trace1, first 300 jobs, mean JCT", "muri-s", _muri("trace1", 300), seeds=1, ablated=False
    ),
    Workload(
        "Muri", "trace2, first 300 jobs, mean JCT", "muri-s", _muri("trace2", 300), seeds=1, ablated=False
    ),
    Workload(
        "Muri", "trace4, first 400 jobs, mean JCT", "muri-s", _muri("trace4", 400), seeds=1, ablated=False
    ),
    *_coda_rows(),
    Workload("Liquid", "batch on 5 nodes, mean JCT", "liquid", _liquid("liquid/batch-5", 0, batch=True)),
    Workload("Liquid", "batch on 5 nodes, makespan", "liquid", _liquid("liquid/batch-5", 1, batch=True)),
    Workload(
        "Liquid",
        "one job at a time, JCT",
        "liquid",
        _liquid("liquid/immediate", 0, batch=False),
        ablated=False,
    ),
    Workload(
        "SpeCon", "fixed schedule, mean JCT", "specon", _specon("fixed", specon_tables.mean_s), ablated=False
    ),
    Workload("SpeCon", "20 at random, mean JCT", "specon", _specon("random-20", specon_tables.mean_s)),
    Workload(
        "SpeCon",
        "30 at random, mean JCT",
        "specon",
        _specon("random-30", specon_tables.mean_s),
        ablated=False,
    ),
    Workload(
        "SpeCon",
        "50 at random on 8 nodes, mean JCT",
        "specon",
        _specon("random-50", specon_tables.mean_s),
        ablated=False,
    ),
    Workload("SpeCon", "20 at random, makespan", "specon", _specon("random-20", specon_tables.makespan_s)),
    Workload("GENIE", "5 an hour, share in time", "genie", _genie(5), higher_is_better=True, ablated=False),
    Workload("GENIE", "10 an hour, share in time", "genie", _genie(10), higher_is_better=True, ablated=False),
    Workload("GENIE", "20 an hour, share in time", "genie", _genie(20), higher_is_better=True),
)


def named_cores() -> PaperTable:
    """What it costs that Penstock takes cores that users named for the fewest."""
    seeds = range(ABLATED_SEEDS)
    coda = [coda_workload.run("coda", "named", seed) for seed in seeds]
    rows = []
    for label, contention in NAMED_CORES:
        ours = [coda_workload.run(OURS, "named", seed, (), contention) for seed in seeds]
        for what, of in (("trainings", trainings_s), ("CPU jobs", cpu_jobs_s)):
            here, interval = ratio([of(one) for one in coda], [of(one) for one in ours])
            rows.append(Row(f"{label}: mean JCT of {what}", here, interval=interval))
    title = (
        "CODA's cluster where users name the cores of all trainings, and `coda` overrides them: "
        "`penstock` against it"
    )
    return PaperTable("composed-named-cores", title, "times", rows, f"{ABLATED_SEEDS} seeds.")


def better(workload: Workload, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """How many times, as a ratio of means, and its 95 % interval over seeds."""
    return ratio(ours, theirs) if workload.higher_is_better else ratio(theirs, ours)


def tables() -> Iterator[PaperTable]:
    rows: list[Row] = []
    by_paper: dict[str, list[float]] = {}
    figures: dict[Workload, list[float]] = {}
    for workload in WORKLOADS:
        seeds = range(workload.seeds)
        ours = figures[workload] = [workload.measure(OURS, seed, ()) for seed in seeds]
        theirs = [workload.measure(workload.own, seed, ()) for seed in seeds]
        found, interval = better(workload, ours, theirs)
        by_paper.setdefault(workload.paper, []).append(found)
        rows.append(
            Row(
                f"{workload.paper}, {workload.label}: vs {workload.own}",
                found,
                interval=interval,
                reach=LEAST,
            )
        )
    more = sum(max(found) > MORE for found in by_paper.values())
    rows.append(Row(f"workloads with more than {MORE}", more, reach=WORKLOADS_WITH_MORE))
    yield PaperTable(
        "composed", "One profile on all workloads: better than each paper's own policy", "times", rows
    )
    yield named_cores()
    yield _ablation(figures)


def _ablation(figures: Mapping[Workload, Sequence[float]]) -> PaperTable:
    """`figures`: with all stages."""
    rows = []
    for workload, found in figures.items():
        if not workload.ablated:
            continue
        ours = found[:ABLATED_SEEDS]
        for stage in get_args(Stage):
            left_out = [workload.measure(OURS, seed, (stage,)) for seed in range(len(ours))]
            if not np.allclose(left_out, ours):
                times, interval = better(workload, ours, left_out)
                rows.append(Row(f"{workload.paper}, {workload.label}: {stage}", times, interval=interval))
    return PaperTable(
        "composed-ablation",
        "What each stage of `penstock` brings: with it against without it",
        "times",
        rows,
        (
            f"The first {ABLATED_SEEDS} seeds; stages that change nothing are left out. Mean figure with all "
            "stages: "
        )
        + "; ".join(f"{one.paper}, {one.label} {fmean(found):,.4g}" for one, found in figures.items()),
    )


if __name__ == "__main__":
    main("tests.papers.default.composed_tables", tables)
