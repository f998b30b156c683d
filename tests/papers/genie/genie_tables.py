"""GENIE's tasks through the real engine, beside Figs 4 and 5: `python -m tests.papers.genie.genie_tables`.

Tasks are those of `penstock_papers.generators.genie`, each free to run on any ⟨n, g⟩. What a policy knows of
them is predicted from B + N + G points of each model's measured step times, by the estimator's model of step
times or by GENIE's own (eq. 1 – 3); how long they take is the whole measured table. The share of tasks that
meet their expected completion (eq. 4) leaves out urgent ones, which expect theirs at once. Intervals: 95 %
over 20 seeds, resampled.

A seed is the first eight hours of the source's day: rates, tasks and cluster are those of the whole day, and
a queue that grows does so within them. The whole day is there with one seed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil, exp, inf
from statistics import fmean
from time import process_time
from typing import NamedTuple

import msgspec

from penstock.ledger.state.job.job_state import JobState
from penstock.model.nouns.settings import PlacerSettings, Stage
from penstock.model.nouns.types import Estimate, ShapeOption
from penstock.scheduling.order.deadlines import odds
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.generators.base import source
from penstock.simulator.generators.registry import generators
from penstock.simulator.job_models.measurements.measured import read_model
from penstock.simulator.job_models.measurements.placement_table import RESTART_S, Model
from penstock.simulator.job_models.measurements.steps import StepTimes
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock_papers.generators.genie import MODELS
from penstock_papers.settings import Genie, GenieSettings
from penstock_services.estimator.core.records.placements import Cell, Measurement, table
from penstock_services.estimator.core.step_time.fit import fit, reference_batch
from penstock_services.estimator.core.step_time.prior import WIDE
from penstock_services.gateway.core.forecasts.deadline import Outlook, outlook
from penstock_services.gateway.core.forecasts.forecast_errors import ForecastErrors
from tests.papers.estimator.models.genie import Genie as Fitted
from tests.papers.estimator.models.genie import Run, Task, fit_genie, light_profile, predict_genie
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import less, mean, more, ratio
from tests.papers.tables import PaperTable, Row, main
from tests.support.own_settings import with_own

SEEDS = 20
HOURS, DAY = 8, 24
OWN_MODEL_HOURS = 4
"""By GENIE's own model all policies are overloaded, and what they cost grows with the square of the queue."""
NODES, GPUS = 4, 4
RATES = (5, 10, 20)
SCALES = (4, 8, 16, 32)
BASELINES = ("most", "least", "performance", "ratio")
NAMES: Mapping[str, str] = {
    "most": "MaxOcc",
    "least": "MinOcc",
    "performance": "PerfPre",
    "ratio": "CERPre",
    "qos": "GENIE",
    "protect": "ours",
}
THETAS = (0.0, 0.5, 2.0)
THETA = 0.5
OURS, GENIES = "estimator", "genie"
RESTART = RestartCost(save_s=5.0, launch_s=RESTART_S, interval_s=600.0)
EDGES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
WITHIN = 5.0
"""Largest calibration error of the odds, in points."""
LEVEL = 0.9
PUBLISHED_MET, PUBLISHED_MAKESPAN = 67.4, 28.2
"""At most, over the best baseline: percent more tasks in time, percent less makespan. Source: GENIE §III-B,
Fig. 4."""


class Outcome(NamedTuple):
    """Of one run. `met`: share of tasks in time, 0 – 1, urgent ones left out; `makespan_s`; `urgent_s`: from
    submission to end of an urgent one, on average."""

    met: float
    makespan_s: float
    last_s: float
    """When the last task comes."""
    cpu_s: float
    """Processor time of the run, simulated nodes included."""
    urgent_s: float = 0.0
    odds: tuple[tuple[float, bool], ...] = ()
    """Of each task that is not urgent: the odds when it started, and whether it was in time."""
    asked: tuple[tuple[float, bool], ...] = ()
    """Of each task that is not urgent and for which odds were known: what its user was answered when it was
    submitted, and whether it was done by the time of that answer."""


@cache
def models() -> Mapping[str, Model]:
    folder = source("genie", "pollux/traces")
    return {name: read_model(folder / name) for name in MODELS}


@cache
def profiled(name: str, inference: bool) -> Sequence[Run]:
    """B + N + G measured points of its own kind. Source: GENIE §II-B."""
    model = models()[name]
    batches = sorted(int(batch) for batch, *_ in model.epochs[0].noise)
    middle = batches[len(batches) // 2]
    return [
        Run(batch, nodes, gpus, rate)
        for batch, nodes, gpus in light_profile(batches, range(2, NODES + 1), range(2, GPUS + 1), middle)
        if nodes * gpus <= batch
        and (rate := measured_rate(name, inference, round(batch), (gpus,) * nodes)) > 0
    ]


def measured_rate(name: str, inference: bool, batch: int, held: tuple[int, ...]) -> float:
    """Samples per second, as job model `step-times` has it."""
    model = models()[name]
    local, steps = model.batching(sum(held), batch)
    step_s, sync_s = model.step(held, local)
    passes_s = (steps + 1) * (step_s - sync_s)
    return sum(held) * local * (steps + 1) / (passes_s if inference else passes_s + sync_s)


Steps = Callable[[int, int, int], tuple[float, float, float] | None]
"""(batch, n, g) → seconds of an iteration with its interval; None: no prediction."""


@cache
def steps_of(name: str, inference: bool, learner: str) -> Steps:
    """What the model of this task type predicts."""
    runs = profiled(name, inference)
    return _genies(fit_genie(runs), inference) if learner == "genie" else _ours(runs)


def _genies(model: Fitted, inference: bool) -> Steps:
    def predicted(batch: int, nodes: int, gpus: int) -> tuple[float, float, float] | None:
        found = predict_genie(model, Task(batch, 1, not inference), nodes, gpus, level=LEVEL)
        if found.throughput <= 0:
            return None
        return found.step_s, batch / found.high_throughput, batch / max(found.low_throughput, 1e-9)

    return predicted


def _ours(runs: Sequence[Run]) -> Steps:
    measured = table(
        Measurement(
            Cell((run.gpus_per_node,) * run.nodes, run.batch / (run.nodes * run.gpus_per_node)),
            run.batch / run.throughput,
        )
        for run in runs
    )
    model = fit(measured, WIDE, reference_batch(measured))
    factor = model.factor(LEVEL)

    def predicted(batch: int, nodes: int, gpus: int) -> tuple[float, float, float] | None:
        found = model.steps([Cell((gpus,) * nodes, batch / (nodes * gpus))])
        middle, wide = float(found.log_s[0]), min(50.0, factor * float(found.spread[0]))
        return exp(middle), exp(middle - wide), exp(middle + wide)

    return predicted


@cache
def options_of(name: str, inference: bool, batch: int, learner: str) -> tuple[ShapeOption, ...]:
    """Each ⟨n, g⟩ of at most NODES × GPUS with what the model predicts, ⟨1, 1⟩ first; those that it has
    nothing for are left out."""
    steps, found = steps_of(name, inference, learner), []
    for nodes in range(1, NODES + 1):
        for gpus in range(1, GPUS + 1):
            predicted = steps(batch, nodes, gpus) if nodes * gpus <= batch else None
            if predicted is not None:
                step_ms, low_ms, high_ms = (min(1_000 * value, 1e11) for value in predicted)
                found.append(
                    ShapeOption(
                        workers=nodes * gpus,
                        nodes=nodes,
                        gpus_per_node=gpus,
                        step_ms=step_ms,
                        low_ms=low_ms,
                        high_ms=high_ms,
                    )
                )
    return tuple(found)


def predicts(job: TraceJob, estimate: Estimate, learner: str) -> Estimate:
    assert job.batch_size is not None, job
    assert job.iterations is not None, job
    options = options_of(job.model, job.inference, job.batch_size, learner)
    startup_ms = ceil(1_000 * RESTART_S)
    return msgspec.structs.replace(
        estimate,
        options=options,
        launch_ms=startup_ms,
        run_ms=startup_ms + ceil(job.iterations * options[0].step_ms),
    )


@cache
def tasks_of(per_hour: int, seed: int) -> Sequence[TraceJob]:
    """Of a day; half of the time of a small simulation is reading the tables that they are made of."""
    return generators()[f"genie/{per_hour}-per-hour"].make(seed)


@simulated(Outcome(1.0, 1.0, 1.0, 1.0))
def run(
    per_hour: int,
    choose: str,
    seed: int,
    nodes: int = NODES,
    theta: float = THETA,
    learner: str = OURS,
    restarts: bool = False,
    make_way: bool = False,
    profile: str = "genie",
    without: tuple[Stage, ...] = (),
    hours: int = HOURS,
    asks: bool = False,
) -> Outcome:
    """`nodes`: at least NODES. `restarts`: a stop costs a save, and the next start a launch; else nothing.
    `hours`: of tasks. `asks`: what users are answered at submission."""
    began_s = process_time()
    whole = NODES * GPUS
    tasks = [
        job._replace(
            gpus=min(whole, job.batch_size or 1), workers=min(whole, job.batch_size or 1), min_workers=1
        )
        for job in tasks_of(per_hour, seed)
        if job.submit_s < 3_600 * hours
    ]
    genie = Genie(choose=choose, theta=theta, make_way=make_way)  # type: ignore[arg-type]
    settings = (
        with_own(profile, GenieSettings(genie=genie), without=without)
        if profile == "genie"
        else PlacerSettings(profile=profile, without=without)
    )
    options = Options(durations="unknown", predicts=lambda job, estimate: predicts(job, estimate, learner))
    steps = StepTimes(models(), gpus_per_node=GPUS)
    work = RestartingWork(steps, lambda job: RESTART) if restarts else SteadyWork(steps)
    simulation = Simulation(nodes_of(f"{nodes}x{GPUS}@T4"), settings, work, tasks, options)
    due = {
        job.job_id: float(dict(job.labels)["ect_s"]) for job in tasks if dict(job.labels)["qos"] != "urgent"
    }
    found: dict[str, float] = {}
    answers: dict[str, Outlook | None] = {}
    errors = ForecastErrors()
    state = simulation.cell.state
    while simulation.step():
        for job in state.holding.values():
            if job.job_id in due and job.job_id not in found:
                found[job.job_id] = odds_of(job, 1_000 * due[job.job_id])
        if asks:
            for job in state.holding.values():
                if job.placed_ms is not None:
                    errors.placed(job.job_id, job.placed_ms)
            for name, job in state.jobs.items():
                if name in due and name not in answers:
                    one = answers[name] = outlook(state, job, state.now_ms, errors)
                    if one is not None and one.starts_ms is not None:
                        errors.asked(name, one.now_ms, one.starts_ms)
    figures = simulation.figures(0, 0)
    assert figures.unfinished_jobs == 0
    lives = simulation.meter.lives
    in_time = {job_id: lives[job_id].jct_s <= ect_s + 1e-6 for job_id, ect_s in due.items()}
    pairs = tuple((found[job_id], met) for job_id, met in in_time.items())
    urgent_s = fmean([lives[job.job_id].jct_s for job in tasks if job.job_id not in due] or [0.0])
    last_s = max(job.submit_s for job in tasks)
    cpu_s = process_time() - began_s
    asked = tuple(
        (one.odds, 1_000 * (lives[name].end_s or inf) <= one.due_ms)
        for name, one in answers.items()
        if one is not None and one.odds is not None and one.due_ms is not None
    )
    return Outcome(fmean(in_time.values()), figures.makespan_s, last_s, cpu_s, urgent_s, pairs, asked)


def odds_of(job: JobState, expected_ms: float) -> float:
    """When it has just been placed: that it meets what its user expects of it."""
    assert job.estimate is not None, job
    assert job.placed_ms is not None, job
    per_node = Counter(task.place.node_id for task in job.tasks.values())
    shape = len(per_node), max(per_node.values())
    option = next(one for one in job.estimate.options if (one.nodes, one.gpus_per_node) == shape)
    return odds(job, option, job.submitted_ms + expected_ms, job.placed_ms)


Pairs = Sequence[tuple[float, bool]]
"""(odds, 0 – 1; whether it was in time) of each task."""


def buckets(pairs: Pairs) -> Iterator[tuple[float, float, Pairs]]:
    """(low, high, pairs with odds in between); none is empty."""
    for low, high in pairwise(EDGES):
        if here := [(chance, met) for chance, met in pairs if low <= chance < high or chance == high == 1.0]:
            yield low, high, here


def apart(pairs: Pairs) -> float:
    """Points between what is predicted on average and the share that is met."""
    return 100 * abs(fmean(chance for chance, _ in pairs) - fmean(met for _, met in pairs))


def calibration_error(pairs: Pairs) -> float:
    """Expected calibration error in points: `apart` of each bucket, weighted by its tasks, so that odds too
    high in one and too low in another do not cancel. Source: Naeini et al., AAAI '15."""
    return sum(len(here) * apart(here) for _, _, here in buckets(pairs)) / len(pairs) if pairs else 0.0


def calibration(key: str, title: str, by_rate: Mapping[int, Pairs]) -> PaperTable:
    """Odds against what came of them. `by_rate`: tasks an hour → its pairs."""
    pairs = [pair for found in by_rate.values() for pair in found]
    rows = []
    for low, high, here in buckets(pairs):
        label = f"odds of {100 * low:.0f} to {100 * high:.0f} %, {len(here)} tasks"
        remark = f"{100 * fmean(chance for chance, _ in here):.0f} % predicted"
        rows.append(Row(label, 100 * fmean(met for _, met in here), remark=remark))
    what = "calibration error in points"
    rows.append(Row(f"all: {what}", calibration_error(pairs), reach=WITHIN, better="lower"))
    for per_hour, found in by_rate.items():
        rows.append(Row(f"{per_hour}/h: {what}", calibration_error(found), reach=WITHIN, better="lower"))
    return PaperTable(key, f"{title}: met", "%", rows)


def calibrations(seeds: Sequence[int]) -> Iterator[PaperTable]:
    """Of the odds when a task starts, and of those that its user is answered at its submission, when its
    start is a forecast."""
    started = {rate: [one for seed in seeds for one in run(rate, "qos", seed).odds] for rate in RATES}
    yield calibration("genie-odds", "Odds of a deadline when the task starts", started)
    for profile in ("genie", "penstock"):
        asked = {
            rate: [one for seed in seeds for one in run(rate, "qos", seed, profile=profile, asks=True).asked]
            for rate in RATES
        }
        title = f"Odds of a deadline at submission, under `{profile}`"
        yield calibration(f"genie-odds-asked-{profile}", title, asked)


def averaged(label: str, values: Sequence[float], reach: float | None = None, better: str = "higher") -> Row:
    """The mean over seeds, with its interval."""
    here, interval = mean(values)
    return Row(label, here, interval=interval, reach=reach, better=better)


def rows(
    label: str, per_hour: int, seeds: Sequence[int], nodes: int = NODES, hours: int = HOURS
) -> tuple[list[Row], list[Row]]:
    """Of the share in time, and of the makespan in hours."""
    met: list[Row] = []
    makespans: list[Row] = []
    best = {"met": 0.0, "makespan": float("inf")}
    for choose in (*BASELINES, "qos", "protect"):
        found = [run(per_hour, choose, seed, nodes, hours=hours) for seed in seeds]
        share = [100 * one.met for one in found]
        ended = [one.makespan_s / 3_600 for one in found]
        ours = choose not in BASELINES
        met.append(averaged(f"{label}: {NAMES[choose]}", share, best["met"] if ours else None))
        makespans.append(
            averaged(f"{label}: {NAMES[choose]}", ended, best["makespan"] if ours else None, "lower")
        )
        best = {"met": max(best["met"], met[-1].here), "makespan": min(best["makespan"], makespans[-1].here)}
    return met, makespans


def gains(seeds: Sequence[int]) -> Iterator[PaperTable]:
    """Over the best baseline, which is another one at each rate; and what there is to gain."""
    met: list[Row] = []
    makespans: list[Row] = []
    for choose in ("qos", "protect"):
        for per_hour in RATES:
            label = f"{per_hour}/h: {NAMES[choose]}"
            ours = [run(per_hour, choose, seed) for seed in seeds]
            others = [[run(per_hour, other, seed) for seed in seeds] for other in BASELINES]
            best = max(others, key=lambda found: fmean(one.met for one in found))
            here, interval = more([one.met for one in ours], [one.met for one in best])
            left = 100 * (1 / fmean(one.met for one in best) - 1)
            met.append(Row(label, here, interval=interval, remark=f"all tasks in time: {left:.3g} %"))
            best = min(others, key=lambda found: fmean(one.makespan_s for one in found))
            here, interval = less([one.makespan_s for one in ours], [one.makespan_s for one in best])
            left, _ = less([one.last_s for one in best], [one.makespan_s for one in best])
            remark = f"over when the last task comes: {left:.3g} %"
            makespans.append(Row(label, here, interval=interval, remark=remark))
    for key, what, unit, rows, published in (
        ("genie-gain", "tasks in time", "% more", met, PUBLISHED_MET),
        ("genie-makespan-gain", "makespan", "% less", makespans, PUBLISHED_MAKESPAN),
    ):
        rows.append(Row("most", max(row.here for row in rows), published, reach=published))
        yield PaperTable(key, f"GENIE against the best baseline: {what}", unit, rows)


def making_way(seeds: Sequence[int]) -> Iterator[PaperTable]:
    """Where a running job may make way for one that cannot wait, and a restart costs a save of 5 s and a
    launch of 30 s. Under `genie` that is a setting, under `penstock` a stage."""
    for profile, key in (("genie", "genie-make-way"), ("penstock", "genie-make-way-penstock")):
        met: list[Row] = []
        urgent: list[Row] = []
        best = 0.0
        for per_hour in RATES:
            for make_way, label in ((False, "no job makes way"), (True, "jobs make way")):
                without: tuple[Stage, ...] = () if make_way or profile == "genie" else ("make_way",)
                found = [
                    run(
                        per_hour,
                        "protect",
                        seed,
                        restarts=True,
                        make_way=make_way and profile == "genie",
                        profile=profile,
                        without=without,
                    )
                    for seed in seeds
                ]
                share, seconds = [100 * one.met for one in found], [one.urgent_s for one in found]
                met.append(averaged(f"{per_hour}/h: {label}", share, best if make_way else None))
                urgent.append(averaged(f"{per_hour}/h: {label}", seconds, better="lower"))
                best = met[-1].here
        title = f"Jobs that make way, under `{profile}`"
        yield PaperTable(key, f"{title}: tasks in time", "%", met)
        yield PaperTable(f"{key}-urgent", f"{title}: from submission to end of urgent ones", "s", urgent)


def tables() -> Iterator[PaperTable]:
    seeds = range(SEEDS)
    met: list[Row] = []
    makespans: list[Row] = []
    day: list[Row] = []
    for per_hour in RATES:
        of_rate = rows(f"{per_hour}/h", per_hour, seeds)
        met += of_rate[0]
        makespans += of_rate[1]
        day += rows(f"{per_hour}/h", per_hour, range(1), hours=DAY)[0]
    yield PaperTable("genie-day", "GENIE, 4 × 4 GPUs, the whole day, one seed: tasks in time", "%", day)
    yield PaperTable("genie-qos", "GENIE, 4 × 4 GPUs: tasks in time", "%", met)
    yield PaperTable("genie-makespan", "GENIE, 4 × 4 GPUs: makespan", "hours", makespans)
    yield from gains(seeds)
    yield from calibrations(seeds)
    yield _scheduling(seeds)
    met, makespans = [], []
    for nodes in SCALES:
        of_scale = rows(f"{nodes * GPUS} GPUs", 20, seeds, nodes)
        met += of_scale[0]
        makespans += of_scale[1]
    yield PaperTable("genie-scale-qos", "GENIE, 20 tasks an hour: tasks in time", "%", met)
    yield PaperTable("genie-scale-makespan", "GENIE, 20 tasks an hour: makespan", "hours", makespans)
    found = []
    for theta in THETAS:
        for per_hour in RATES:
            ours = [100 * run(per_hour, "qos", seed, NODES, theta).met for seed in seeds]
            found.append(averaged(f"θ {theta:g}, {per_hour}/h", ours))
    yield PaperTable(
        "genie-theta", "What another node costs (θ of eq. 5, not published): tasks in time", "%", found
    )
    yield from making_way(seeds)
    found = []
    for choose in ("ratio", "qos", "protect"):
        ours = [100 * run(20, choose, seed, learner=GENIES, hours=OWN_MODEL_HOURS).met for seed in seeds]
        found.append(averaged(f"20/h: {NAMES[choose]}", ours))
    yield PaperTable(
        "genie-own-model",
        f"Predicted by GENIE's own model (eq. 1 – 3), {OWN_MODEL_HOURS} hours: tasks in time",
        "%",
        found,
    )


def _scheduling(seeds: Sequence[int]) -> PaperTable:
    """Processor time of the whole run, of which decisions are a part."""
    rows = []
    for per_hour in RATES:
        found = [run(per_hour, "qos", seed) for seed in seeds]
        here, _ = ratio([100 * one.cpu_s for one in found], [one.makespan_s for one in found])
        rows.append(Row(f"{per_hour}/h", here, 1.0, reach=1.0, better="lower"))
    title = "GENIE: processor time of scheduling, simulated nodes included, of the makespan"
    return PaperTable("genie-overhead", title, "%", rows)


if __name__ == "__main__":
    main("tests.papers.genie.genie_tables", tables)
