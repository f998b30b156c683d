"""One function per bench: seconds and size in, values of its figures out."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import uvloop

from penstock.scheduling.groups.interleave import Interleave
from tests.bench import answers, commands
from tests.bench.cases import CASES, DEFAULT, HISTORY, Case
from tests.bench.live import pipeline, submit
from tests.bench.machine import quantile
from tests.bench.scheduling import bursts, core, planner, window
from tests.bench.servers import KINDS
from tests.bench.services import estimator, idle, restart, steps
from tests.bench.simulation import large_cells, simulator

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. The issue's targets are for the defaults."""

    seconds: float = 60.0
    """Of each run that lasts (pipeline, submissions, idleness)."""
    nodes: int = 1_000
    many_nodes: int = 10_000
    events: int = 20_000
    waiting: int = core.WAITING
    """Jobs in the queue of contended cells."""
    cell: tuple[str, int] = ("309x8", large_cells.CELLS["309x8"])
    """Nodes × GPUs and jobs of the simulated large cell."""
    answers: int = answers.ANSWERS
    commands: int = commands.REPEATS
    records: int = restart.LEDGER_RECORDS
    jobs: int = 1_000
    """Of the smaller simulation; the larger one has ten times as many."""
    rate_per_s: float = pipeline.RATE_PER_S
    burst: tuple[int, int] = (200, 128)
    """Jobs and nodes."""
    windows: int = window.REPEATS
    repeats: int = 3
    runs: int = estimator.RUNS
    """Finished ones that the estimator learns from."""
    estimates: int = estimator.ONE_BY_ONE
    at_once: int = estimator.AT_ONCE


QUICK = Size(
    seconds=10.0,
    events=2_000,
    waiting=1_000,
    cell=("39x8", 2_000),
    answers=20,
    commands=5,
    records=30_000,
    jobs=300,
    repeats=1,
    estimates=200,
)
TINY = Size(
    seconds=1.0,
    nodes=20,
    many_nodes=40,
    events=100,
    waiting=20,
    cell=("5x8", 20),
    answers=3,
    commands=1,
    records=300,
    jobs=10,
    burst=(8, 5),
    windows=1,
    rate_per_s=50.0,
    repeats=1,
    runs=120,
    estimates=5,
    at_once=20,
)  # whether the benches work, not how fast anything is


def run_core(case: Case, size: Size) -> Values:
    events_per_s, p99_ms, small = core.measure(case, size.nodes, size.events, size.waiting)
    values = {f"placer_core_events_per_s_{case}": events_per_s, f"placer_core_p99_ms_{case}": p99_ms}
    if case != Case(HISTORY, contended=False):
        return values
    values["fold_records_per_s"] = max(core.fold_rate(small.ledger) for _ in range(size.repeats))
    del small
    large_per_s, _, _ = core.measure(case, size.many_nodes, size.events)
    return values | {"placer_core_10k_nodes_ratio": events_per_s / large_per_s}


def run_large_cells(case: Case, size: Size) -> Values:
    found = large_cells.measure(*size.cell, case)
    return {f"large_cell_events_per_s_{case}": found.events_per_s}


def run_answers(size: Size) -> Values:
    found = answers.measure(size.nodes, size.waiting, size.answers)
    return {
        f"{route}_p{percent}_ms_{DEFAULT}_contended": quantile(times_ms, percent / 100)
        for route, times_ms in (("why", found.why_ms), ("queue", found.queue_ms))
        for percent in (50, 99)
    }


def run_commands(size: Size) -> Values:
    values: Values = {}
    for name, times_ms in asyncio.run(commands.measure(size.commands)).items():
        values[f"command_{name}_cpu_least_ms"] = min(times_ms)
        values[f"command_{name}_cpu_p50_ms"] = median(times_ms)
    return values


def run_simulator(size: Size) -> Values:
    values: Values = {}
    for profile in simulator.PROFILES:
        per_s, ratio = simulator.measure(profile, size.jobs, size.repeats)
        values[f"simulator_events_per_s_{profile}"] = per_s
        values[f"simulator_10x_jobs_ratio_{profile}"] = ratio
    return values


def run_planner(size: Size) -> Values:
    exact_ms, ours_ms, share = planner.measure(size.jobs, size.repeats)
    return {
        "planner_muri_ms": exact_ms,
        "planner_interleave_ms": ours_ms,
        "planner_weight_ratio": share,
        "planner_distinct_ms": planner.plan_ms(None, size.jobs, 1, size.jobs),
        "planner_distinct_interleave_ms": planner.plan_ms(Interleave, size.jobs, 1, size.jobs),
        "planner_distinct_weight_ratio": planner.weight_distinct(planner.MATCHED),
    }


def run_bursts(size: Size) -> Values:
    ours, published = (
        [bursts.measure(*size.burst, exact=exact) for _ in range(size.repeats)] for exact in (False, True)
    )
    return {
        "burst_200_jobs_128_nodes_ms": min(one.took_ms for one in ours),
        "burst_200_jobs_128_nodes_published_ms": min(one.took_ms for one in published),
        "burst_cost_ratio": ours[0].share,
    }


def run_window(size: Size) -> Values:
    return {
        f"window_{kind}_p99_ratio": within_ms / without_ms
        for kind, (without_ms, within_ms) in window.p99s_ms(size.windows).items()
    }


def run_submit(log: str, size: Size) -> Values:
    found_ms = asyncio.run(submit.measure(log, size.seconds))
    return {
        f"submit_to_start_p50_ms_{log}": quantile(found_ms, 0.5),
        f"submit_to_start_p99_ms_{log}": quantile(found_ms, 0.99),
    }


def run_pipeline(log: str, case: Case, size: Size) -> Values:
    if case.contended:
        load = pipeline.contended(size.seconds, waiting=size.waiting)
    else:
        load = pipeline.Load(size.nodes, size.rate_per_s, size.seconds)
    found, end = uvloop.run(pipeline.measure(log, case, load)), f"{log}_{case}"
    values = {
        f"pipeline_jobs_per_s_{end}": found.jobs_per_s,
        f"pipeline_cpu_us_per_job_{end}": sum(found.cpu_us_per_job.values()),
        f"pipeline_others_cores_{end}": found.others_cores,
    }
    if case.contended:
        return values | {
            f"pipeline_vacant_p50_ms_{end}": quantile(found.vacant_ms, 0.5),
            f"pipeline_vacant_p99_ms_{end}": quantile(found.vacant_ms, 0.99),
        }
    return values | {
        f"pipeline_start_p50_ms_{end}": quantile(found.latencies_ms, 0.5),
        f"pipeline_start_p99_ms_{end}": quantile(found.latencies_ms, 0.99),
        f"pipeline_backlog_growth_jobs_{end}": found.growth,
    }


def run_restart(size: Size) -> Values:
    with_one, without = uvloop.run(restart.measure(size.records, size.nodes, size.repeats))
    return {"placer_restart_s": with_one, "placer_restart_without_snapshot_s": without}


def run_estimator(size: Size) -> Values:
    found = uvloop.run(estimator.measure(size.runs, size.nodes, size.estimates, size.at_once, size.repeats))
    one_ms, forest_ms = median(found.one), median(found.forest)
    return {
        "estimator_one_p50_ms": one_ms,
        "estimator_one_p99_ms": quantile(found.one, 0.99),
        "estimator_one_cpu_p99_ms": quantile(found.one_cpu, 0.99),
        "estimator_one_forest_ms": forest_ms,
        "estimator_forest_ratio": forest_ms / one_ms,
        "estimator_answer_p99_ms": quantile(found.answered, 0.99),
        "estimator_1000_model_ms": median(found.together),
        "estimator_1000_model_cpu_ms": median(found.together_cpu),
        "estimator_1000_tiers_ms": median(found.at_once),
        "estimator_1000_tiers_cpu_ms": median(found.at_once_cpu),
        "estimator_1000_appended_ms": median(found.at_once_appended),
        "estimator_training_cpu_s": found.training_cpu_s,
        "estimator_training_s": found.training_s,
        "estimator_training_one_p99_ms": quantile(found.one_training, 0.99),
        "estimator_training_ready_p99_ms": quantile(found.ready_training, 0.99),
        "estimator_training_answer_p50_ms": median(found.answered_training),
        "estimator_training_answer_p99_ms": quantile(found.answered_training, 0.99),
        "estimator_rss_mib": found.rss_mib,
        "estimator_others_cores": found.others_cores,
    }


def run_steps(size: Size) -> Values:
    found = steps.measure(size.runs, size.at_once, size.repeats)
    return {
        "steps_training_cpu_s": found.training_s,
        "steps_reading_cpu_ms": found.reading_ms,
        "steps_one_cpu_p50_ms": median(found.one_ms),
        "steps_one_cpu_p99_ms": quantile(found.one_ms, 0.99),
        "steps_1000_cpu_ms": median(found.at_once_ms),
        "steps_eta_cpu_p50_ms": median(found.eta_ms),
        "steps_eta_cpu_p99_ms": quantile(found.eta_ms, 0.99),
    }


def run_idle(size: Size) -> Values:
    found = uvloop.run(idle.measure(size.seconds))
    return {
        "idle_rss_mib": found.rss_mib,
        "idle_messages_per_min": found.messages_per_min,
        "idle_cpu_percent": found.cpu_percent,
        "idle_postgres_mib": found.postgres_mib,
        "idle_postgres_cpu_percent": found.postgres_cpu_percent,
    }


RUNS: dict[str, Callable[[Size], Values]] = {
    **{f"core_{case}": partial(run_core, case) for case in CASES},
    **{f"large_cells_{case}": partial(run_large_cells, case) for case in CASES},
    "answers": run_answers,
    "commands": run_commands,
    "simulator": run_simulator,
    "planner": run_planner,
    "bursts": run_bursts,
    "window": run_window,
    **{f"submit_{log}": partial(run_submit, log) for log in KINDS},
    **{f"pipeline_{log}_{case}": partial(run_pipeline, log, case) for log in KINDS for case in CASES},
    "restart": run_restart,
    "estimator": run_estimator,
    "steps": run_steps,
    "idle": run_idle,
}
