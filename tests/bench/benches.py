"""One function per bench: seconds and size in, values of its figures out."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import uvloop

from penstock.scheduling.groups.interleave import Interleave
from tests.bench import (
    bursts,
    core,
    estimator,
    idle,
    pipeline,
    planner,
    restart,
    simulator,
    steps,
    submit,
    window,
)
from tests.bench.machine import quantile

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. The issue's targets are for the defaults."""

    seconds: float = 60.0
    """Of each run that lasts (pipeline, submissions, idleness)."""
    nodes: int = 1_000
    many_nodes: int = 10_000
    events: int = 20_000
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


QUICK = Size(seconds=10.0, events=4_000, records=30_000, jobs=300, repeats=1, estimates=200)
TINY = Size(
    seconds=1.0,
    nodes=20,
    many_nodes=40,
    events=100,
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


def run_core(size: Size) -> Values:
    events_per_s, p99_ms, small = core.measure(size.nodes, size.events)
    fold_per_s = max(core.fold_rate(small.ledger) for _ in range(size.repeats))
    del small
    large_per_s, _, _ = core.measure(size.many_nodes, size.events)
    return {
        "placer_core_events_per_s": events_per_s,
        "placer_core_p99_ms": p99_ms,
        "placer_core_10k_nodes_ratio": events_per_s / large_per_s,
        "fold_records_per_s": fold_per_s,
    }


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


def run_pipeline(log: str, size: Size) -> Values:
    found = uvloop.run(pipeline.measure(log, size.seconds, size.nodes, size.rate_per_s))
    return {
        f"pipeline_jobs_per_s_{log}": found.jobs_per_s,
        f"pipeline_start_p50_ms_{log}": quantile(found.latencies_ms, 0.5),
        f"pipeline_start_p99_ms_{log}": quantile(found.latencies_ms, 0.99),
        f"pipeline_backlog_growth_jobs_{log}": found.growth,
        f"pipeline_cpu_us_per_job_{log}": sum(found.cpu_us_per_job.values()),
        f"pipeline_others_cores_{log}": found.others_cores,
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
    "core": run_core,
    "simulator": run_simulator,
    "planner": run_planner,
    "bursts": run_bursts,
    "window": run_window,
    "submit_embedded": lambda size: run_submit("embedded", size),
    "pipeline_embedded": lambda size: run_pipeline("embedded", size),
    "submit_kafka": lambda size: run_submit("kafka", size),
    "pipeline_kafka": lambda size: run_pipeline("kafka", size),
    "restart": run_restart,
    "estimator": run_estimator,
    "steps": run_steps,
    "idle": run_idle,
}
