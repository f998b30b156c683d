"""The benches work: each runs at a tiny size. Nothing here says how fast anything is."""

import pytest
from tests.bench import core, idle, pipeline, restart
from tests.bench.benches import RUNS, TINY, run_simulator
from tests.bench.figures import BENCHES, GOALS
from tests.bench.machine import calibrate_ms, quantile


def test_the_core_bench_leaves_a_sound_cell() -> None:
    """A change of the placer's interface must not be noticed first by whoever measures next month."""
    events_per_s, p99_ms, bench = core.measure(TINY.nodes, TINY.events)
    assert events_per_s > 0
    assert p99_ms > 0
    assert core.fold_rate(bench.ledger) > 0


def test_the_simulator_bench_ends_every_job_and_reports_every_figure() -> None:
    """A profile that is renamed, or one that leaves a job waiting, must be noticed here."""
    values = run_simulator(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "simulator"}
    assert all(value > 0 for value in values.values())


@pytest.mark.postgres
async def test_the_embedded_pipeline_starts_every_job_once() -> None:
    """The bench judges itself: each job started and succeeded, no GPU was shared."""
    run = await pipeline.measure("embedded", TINY.seconds, TINY.nodes, TINY.rate_per_s, run_ms=100.0)
    assert run.jobs == len(run.latencies_ms) == round(TINY.seconds * TINY.rate_per_s)
    assert 0 < quantile(run.latencies_ms, 0.5) < 10_000
    assert set(run.cpu_us_per_job) == {"postgres", "services"}


def test_every_figure_has_a_bench_and_every_bench_runs_somewhere() -> None:
    """A figure that no bench reports would silently vanish from bench.json."""
    assert set(RUNS) == set(BENCHES)
    named = {
        "placer_core_events_per_s",
        "pipeline_jobs_per_s_kafka",
        "placer_restart_s",
        "idle_messages_per_min",
    }
    assert named <= set(GOALS)
    assert GOALS["placer_restart_s"].met(1.9)
    assert not GOALS["placer_restart_s"].met(2.1)
    assert GOALS["pipeline_jobs_per_s_kafka"].met(1_000)
    best_ms, median_ms = calibrate_ms()
    assert 0 < best_ms <= median_ms


@pytest.mark.postgres
async def test_a_restarted_placer_answers_on_the_bench_ledger() -> None:
    """The bench's ledger must be one that a placer accepts, with and without a snapshot."""
    with_one, without = await restart.measure(TINY.records, TINY.nodes, repeats=1)
    assert 0 < with_one < 30
    assert 0 < without < 30


@pytest.mark.postgres
async def test_everything_runs_in_one_process_for_the_idle_bench() -> None:
    """The bench composes the services as `penstock up` does; a change there must reach it."""
    found = await idle.measure(seconds=0.5, settle_s=0.5)
    assert 20 < found.rss_mib < 1_000
    assert found.messages_per_min >= 0
