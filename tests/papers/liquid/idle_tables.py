"""`python -m tests.papers.liquid.idle_tables`: how long a GPU is idle between two jobs (Liquid §6.1, §6.3,
§7.3.1, §7.3.3).

Sequences of equal jobs on one GPU, through the real engine: placer, estimator and node core. *Idle*: from the
last iteration of a job to the first of the next, by the phases that they report. A figure is the reduction of
the mean over all gaps of a sequence, in percent; the interval is over sequences (bootstrap).

Truth. The authors ran CNN-MNIST and NeuMF on K80 and T4, of which no table has a launch or a save. Launches
are Muri's measured start-ups on one GPU (V100), iterations are from the same table, saves are measured by the
size of the model's state (`job_models/measured_restarts.py`); 50 · U{4 … 20} iterations as in the authors'
launchers. Nothing here is fitted to the published figures.

Pre-scheduling gives the next job its GPU when the one before is proven dead (LAW 4), not while it saves: what
it can win is the launch, and what is left is the save. So the larger the launch against the save, the more it
wins.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Durations, Options, Simulation
from penstock.simulator.generators.base import rng_of, source
from penstock.simulator.job_models.measurements.measured import read_all
from penstock.simulator.job_models.measurements.measured_restarts import MeasuredPhases, measured_costs
from penstock.simulator.job_models.measurements.tables import STAGE_PROFILES, read_start_ups
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.sharing import LAUNCH_S, SAVE_S, Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import less
from tests.papers.tables import PaperTable, Row, main

SEEDS = 20
JOBS = 8  # of one sequence; of the first ones nothing is known
ITERATIONS, FEWEST, MOST = 50, 4, 20
START_S = 0.005  # of a process
INTERVAL_S = 5.0
INTERVALS_S = (1.0, 2.0, INTERVAL_S, 10.0, 20.0, 60.0)
PUBLISHED_PRELAUNCH = {
    "CNN-MNIST on K80": 50.0,
    "NeuMF on K80": 77.0,
    "CNN-MNIST on T4": 18.0,
    "NeuMF on T4": 30.0,
}
PUBLISHED_EVENTS = {
    "CNN-MNIST on K80": 15.0,
    "NeuMF on K80": 10.0,
    "CNN-MNIST on T4": 16.0,
    "NeuMF on T4": 10.0,
}


class Kind(NamedTuple):
    """A model of Muri's table on one GPU."""

    model: str
    batch_size: int
    iteration_s: float


Costs = Literal["measured", "assumed"]
"""Of launches and saves; assumed: as Liquid's Fig. 12a shows them."""


class Mode(NamedTuple):
    """How a sequence is scheduled."""

    prelaunch: bool = False
    durations: Durations = "learned"
    tick_s: float = 0.0
    checked: bool = False
    """Whether the cell's invariants are checked after each record."""


@cache
def kinds() -> Sequence[Kind]:
    def read(row: Any) -> tuple[str, int, int, float]:
        return (
            row.name("model"),
            row.whole("num_gpu", least=1),
            row.whole("batch_size", least=1),
            row.number("iteration_ms", above=0),
        )

    columns = {"model", "num_gpu", "batch_size", "iteration_ms"}
    found = read_all(source("idle", f"muri/{STAGE_PROFILES}"), columns, read)
    return [Kind(model, batch, ms / 1_000) for model, gpus, batch, ms in found if gpus == 1]


@cache
def job_model(costs: Costs) -> MeasuredPhases | Phases:
    if costs == "assumed":
        return Phases(Constant(), LAUNCH_S, SAVE_S)
    start_ups = read_start_ups(source("idle", f"muri/{STAGE_PROFILES}"))
    return MeasuredPhases(Constant(), measured_costs(start_ups))


def sequence(kind: Kind, seed: int) -> Sequence[TraceJob]:
    """All submitted at once."""
    rng = rng_of(seed, f"idle/{kind.model}")
    jobs = []
    for number in range(JOBS):
        iterations = ITERATIONS * int(rng.integers(FEWEST, MOST + 1))
        jobs.append(
            TraceJob(
                job_id=f"{kind.model}-{number}",
                submit_s=0.0,
                duration_s=iterations * kind.iteration_s,
                gpus=1,
                model=kind.model,
                batch_size=kind.batch_size,
                owner="liquid",
                iterations=iterations,
            )
        )
    return jobs


class Outcome(NamedTuple):
    """What came of one sequence, seconds."""

    gaps_s: Sequence[float]
    """Without training, between each job and the next on the GPU, in order."""
    waits_s: Sequence[float]
    """From the launch of each job that launched early to its GPU."""
    given_back: int
    """Jobs that launched early and in vain."""


def gaps(costs: Costs, kind: Kind, seed: int, mode: Mode) -> Sequence[float]:
    return run(costs, kind, seed, mode).gaps_s


@simulated(Outcome((1.0, 1.0, 1.0), (1.0,), 0))
def run(costs: Costs, kind: Kind, seed: int, mode: Mode) -> Outcome:
    jobs = sequence(kind, seed)
    facts: list[Mapping[str, Any]] = []

    def take(value: bytes) -> None:
        facts.extend(json.loads(value)["facts"])

    # With heartbeats a node starts what it is told at once, and not at the next one.
    latency = Latency() if mode.tick_s else Latency(START_S)
    options = Options(
        latency=latency,
        durations=mode.durations,
        tick_s=mode.tick_s,
        prelaunch=mode.prelaunch,
        check_every_step=mode.checked,
    )
    settings = PlacerSettings(profile="liquid")
    simulation = Simulation(nodes_of("1x1@T4"), settings, SteadyWork(job_model(costs)), jobs, options, take)
    while simulation.step():
        pass
    assert simulation.meter.finished == len(jobs)
    of_kind: dict[str, list[Any]] = {}
    for fact in facts:
        of_kind.setdefault(fact["type"].split(".", 1)[1], []).append(fact["data"])
    phases = of_kind["task.phase_changed.v1"]
    times = sorted((one["at_ms"], one["phase"]) for one in phases if one["phase"] in ("train", "save"))
    assert [phase for _, phase in times] == ["train", "save"] * len(jobs), times
    ready = {one["task_id"]: one["at_ms"] for one in phases if one["phase"] == "ready"}
    early = [one for one in of_kind["task.started.v1"] if one.get("opened_ms") is not None]
    return Outcome(
        [(after - before) / 1_000 for (before, _), (after, _) in zip(times[1::2], times[2::2], strict=False)],
        [max(0, one["opened_ms"] - ready.get(one["task_id"], one["opened_ms"])) / 1_000 for one in early],
        sum(one["reason"] == "predecessor_late" for one in of_kind.get("stop.decided.v1", ())),
    )


def runs(costs: Costs, mode: Mode) -> dict[Kind, list[Sequence[float]]]:
    return {kind: [gaps(costs, kind, seed, mode) for seed in range(SEEDS)] for kind in kinds()}


def flat(by_kind: Mapping[Kind, list[Sequence[float]]]) -> list[Sequence[float]]:
    return [one for found in by_kind.values() for one in found]


def row(label: str, with_s: list[Sequence[float]], without_s: list[Sequence[float]], **more: Any) -> Row:
    """Of sequences, as sums of their gaps."""
    here, interval = less([sum(one) for one in with_s], [sum(one) for one in without_s])
    return Row(label, here, interval=interval, **more)


def shown(published: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {value:g} %" for label, value in published.items())


def prelaunch_tables() -> Iterator[PaperTable]:
    truth = job_model("measured")
    without, learned = (runs("measured", Mode(prelaunch=early)) for early in (False, True))
    rows = [
        row(
            "mean over all models",
            flat(learned),
            flat(without),
            published=fmean(PUBLISHED_PRELAUNCH.values()),
            reach=44.0,
            remark="run times and launches learned from the jobs before in the sequence",
        )
    ]
    for kind in learned:
        save_s, launch_s = truth.save_s(sequence(kind, 0)[0]), truth.start_up_s(sequence(kind, 0)[0])
        remark = f"launch {launch_s:g} s, save {save_s:.2g} s"
        rows.append(row(kind.model, learned[kind], without[kind], remark=remark))
    yield PaperTable(
        "prelaunch",
        "Pre-scheduling: less idle time between jobs on a GPU",
        "% less",
        rows,
        f"Published: {shown(PUBLISHED_PRELAUNCH)}. The authors' next job trains while the one before saves; "
        "ours has the GPU when that is proven dead.",
    )
    known = runs("measured", Mode(prelaunch=True, durations="known"))
    saves = runs("measured", Mode(prelaunch=True, durations="unknown"))
    first = [[one[:2] for one in found] for found in (flat(learned), flat(without))]
    later = [[one[2:] for one in found] for found in (flat(learned), flat(without))]
    theirs, theirs_without = (flat(runs("assumed", Mode(prelaunch=early))) for early in (True, False))
    yield PaperTable(
        "prelaunch-ablation",
        "Pre-scheduling: what is due to what",
        "% less",
        [
            row("ends known exactly", flat(known), flat(without), remark="nothing but the save is left"),
            row("ends learned, gaps after the third job", *later),
            row("ends learned, the first two gaps", *first, remark="nothing, or one run, to learn from"),
            row(
                "no ends known: launched when the one before saves",
                flat(saves),
                flat(without),
                remark="launch and save overlap; saves are short here",
            ),
            row(
                f"launch {LAUNCH_S:g} s, save {SAVE_S:g} s for all",
                theirs,
                theirs_without,
                remark="as Liquid's Fig. 12a shows them",
            ),
        ],
    )


def wrong_tables() -> Iterator[PaperTable]:
    all_runs = [
        run("measured", kind, seed, Mode(prelaunch=True)) for kind in kinds() for seed in range(SEEDS)
    ]
    count = sum(len(one.gaps_s) for one in all_runs)
    waits = [wait_s for one in all_runs for wait_s in one.waits_s]
    yield PaperTable(
        "prelaunch-cost",
        "Pre-scheduling: what it costs",
        "as said",
        [
            Row("jobs that launched early, of 100", 100 * len(waits) / count),
            Row(
                "launched early and given back to the queue, of 100",
                100 * sum(one.given_back for one in all_runs) / count,
                reach=5.0,
                better="lower",
            ),
            Row("waited for the GPU with all launched, s: mean", fmean(waits)),
            Row("the same: 95th percentile", float(np.quantile(waits, 0.95)), reach=60.0, better="lower"),
        ],
        "While it waits a job has host memory of its own, and shares cores; it is bounded by "
        "`prelaunch_wait_ms` (60 s).",
    )


def event_tables() -> Iterator[PaperTable]:
    events = runs("measured", Mode(durations="known"))
    theirs = flat(runs("assumed", Mode(durations="known")))
    rows = []
    for tick_s in INTERVALS_S:
        beats = runs("measured", Mode(durations="known", tick_s=tick_s))
        at = tick_s == INTERVAL_S
        more: dict[str, Any] = {}
        if at:
            more = {"published": fmean(PUBLISHED_EVENTS.values()), "reach": fmean(PUBLISHED_EVENTS.values())}
        rows.append(row(f"heartbeat each {tick_s:g} s", flat(events), flat(beats), **more))
        if at:
            rows += [row(f"  {kind.model}", events[kind], beats[kind]) for kind in events]
            beats_s = flat(runs("assumed", Mode(durations="known", tick_s=tick_s)))
            label = f"  launch {LAUNCH_S:g} s, save {SAVE_S:g} s for all"
            rows.append(row(label, theirs, beats_s, remark="as Liquid's Fig. 12a shows them"))
    yield PaperTable(
        "events",
        "Event-driven against heartbeats: less idle time between jobs on a GPU",
        "% less",
        rows,
        f"Published: {shown(PUBLISHED_EVENTS)}. With a heartbeat the placer hears of ends at its multiples "
        "only.",
    )


def tables() -> Iterator[PaperTable]:
    yield from prelaunch_tables()
    yield from wrong_tables()
    yield from event_tables()


if __name__ == "__main__":
    main("tests.papers.liquid.idle_tables", tables)
