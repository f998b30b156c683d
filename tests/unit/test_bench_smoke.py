"""The benches work: each runs at a tiny size. Nothing here measures speed."""

import pytest

from tests.bench import bursts, core, estimator, idle, pipeline, restart, window
from tests.bench.__main__ import into_readme
from tests.bench.benches import RUNS, TINY, run_bursts, run_planner, run_simulator, run_steps, run_window
from tests.bench.figures import BENCHES, GOALS
from tests.bench.machine import calibrate_ms, quantile


def test_the_core_bench_leaves_a_sound_cell() -> None:
    """A change of the placer's interface must not be noticed first by whoever measures next month."""
    events_per_s, p99_ms, bench = core.measure(TINY.nodes, TINY.events)
    assert events_per_s > 0
    assert p99_ms > 0
    assert core.fold_rate(bench.ledger) > 0


@pytest.mark.slow
def test_the_simulator_bench_ends_every_job_and_reports_every_figure() -> None:
    """A profile that is renamed, or one that leaves a job waiting, must be noticed here."""
    values = run_simulator(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "simulator"}
    assert all(value > 0 for value in values.values())


def test_the_bench_of_the_planner_reports_every_figure() -> None:
    values = run_planner(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "planner"}
    assert values["planner_weight_ratio"] >= 0.999


def test_a_burst_is_planned_no_worse_than_it_was_given() -> None:
    found = bursts.measure(8, 5)
    assert found.share <= 1
    assert found.placed >= found.given


def test_the_bench_of_bursts_reports_every_figure() -> None:
    values = run_bursts(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "bursts"}
    assert values["burst_cost_ratio"] <= 1


def test_the_bench_of_windows_opens_one() -> None:
    """In the window the burst and all that come after it wait; without one all have their place at once, so both ends of a task find the same work."""
    without, within = window.measure()
    assert (without.in_window, without.waiting) == (False, 0)
    assert (within.in_window, within.waiting) == (
        True,
        window.BURST - window.ARRIVALS + 1 + window.RUNNING // 2,
    )
    assert set(without.took_ms) == set(within.took_ms)


def test_the_bench_of_windows_reports_every_figure() -> None:
    values = run_window(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "window"}
    assert all(value > 0 for value in values.values())


@pytest.mark.slow
def test_the_bench_of_steps_reports_every_figure() -> None:
    values = run_steps(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "steps"}
    assert all(value >= 0 for value in values.values())
    assert values["steps_training_cpu_s"] > 0


@pytest.mark.postgres
async def test_the_embedded_pipeline_starts_every_job_once() -> None:
    """The bench judges itself: each job started and succeeded, no GPU was shared."""
    run = await pipeline.measure("embedded", TINY.seconds, TINY.nodes, TINY.rate_per_s, run_ms=100.0)
    assert run.jobs == len(run.latencies_ms) == round(TINY.seconds * TINY.rate_per_s)
    assert 0 < quantile(run.latencies_ms, 0.5) < 10_000
    assert set(run.cpu_us_per_job) == {"postgres", "services"}


def test_one_bench_replaces_its_own_rows_of_the_table_and_no_others() -> None:
    """Somebody measures his part again on a quiet machine; what the rest took a night to measure must stay."""
    page = (
        "before\n<!-- measured -->\n| name | value | unit | reach | |\n|---|---:|---|---:|---|\n"
        "| `placer_core_p99_ms` | 0.194 | ms | ≤ 1 | met |\n| `machine_calibration_ms_core` | 21 | ms |  |  |\n"
        "| `placer_restart_s` | 1.1 | s | ≤ 2 | met |\n| `placer_forgotten_s` | 9 | s |  |  |\n"
        "| `machine_calibration_ms_restart` | 22 | ms |  |  |\n<!-- end -->\nafter\n"
    )
    rows = [
        {"name": "placer_restart_s", "value": 2.5, "unit": "s", "reach": "≤ 2"},
        {"name": "machine_calibration_ms_restart", "value": 19.0, "unit": "ms", "reach": None},
        {"name": "idle_rss_mib", "value": 1_234.0, "unit": "MiB", "reach": None},
    ]
    found = into_readme(page, rows)
    assert found.startswith("before\n<!-- measured -->\n")
    assert found.endswith("\n<!-- end -->\nafter\n")
    assert [line for line in found.splitlines() if line.startswith("| `")] == [
        "| `placer_core_p99_ms` | 0.194 | ms | ≤ 1 | met |",
        "| `machine_calibration_ms_core` | 21 | ms |  |  |",
        "| `placer_restart_s` | 2.5 | s | ≤ 2 | not met |",
        "| `machine_calibration_ms_restart` | 19 | ms |  |  |",
        "| `idle_rss_mib` | 1,234 | MiB |  | not met |",
    ]
    assert into_readme(found, []) == found


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.postgres
async def test_the_estimator_bench_watches_the_service_learn_and_answer() -> None:
    """The bench replaces names of the service's shell; it must still see every estimate, alone, together and meanwhile."""
    found = await estimator.measure(TINY.runs, TINY.nodes, TINY.estimates, TINY.at_once, times=1)
    assert len(found.one) == len(found.answered) == TINY.estimates
    assert 0 < found.together[0] <= found.at_once[0] < found.at_once_appended[0]
    assert 0 < found.training_cpu_s < 60
    assert len(found.one_training) == len(found.answered_training) > 0
    assert 20 < found.rss_mib < 1_000
    assert min(found.forest) > 0
