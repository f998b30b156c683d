"""The benches work: each runs at a tiny size. Nothing here measures speed."""

import pytest

from tests.bench import answers, commands
from tests.bench.__main__ import into_readme
from tests.bench.benches import (
    RUNS,
    TINY,
    run_answers,
    run_bursts,
    run_commands,
    run_planner,
    run_simulator,
    run_steps,
    run_window,
)
from tests.bench.cases import CASES, DEFAULT, Case
from tests.bench.figures import BENCHES, GOALS
from tests.bench.live import pipeline
from tests.bench.machine import calibrate_ms, quantile
from tests.bench.scheduling import bursts, core, window
from tests.bench.services import estimator, idle, restart
from tests.bench.simulation import bytecodes, large_cells


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_core_bench_leaves_a_sound_cell(case: Case) -> None:
    """A change of the placer's interface must not be noticed first by whoever measures next month.

    Contended, the queue stands from the first event that counts to the last; idle, nobody waits.
    """
    events_per_s, p99_ms, bench = core.measure(case, TINY.nodes, TINY.events, TINY.waiting)
    assert events_per_s > 0
    assert p99_ms > 0
    assert core.fold_rate(bench.ledger) > 0
    assert bench.state.settings.profile == case.profile
    waiting = len(bench.state.queue)
    assert (TINY.waiting / 2 <= waiting <= TINY.waiting) if case.contended else waiting == 0


@pytest.mark.parametrize("bench", [name for name in BENCHES if name.startswith(("core_", "large_cells_"))])
def test_a_bench_of_cases_reports_every_figure(bench: str) -> None:
    """The names say the profile and whether jobs wait; `bench.json` must hold all of them."""
    values = RUNS[bench](TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == bench}
    assert all(value > 0 for value in values.values())


def test_jobs_wait_in_the_contended_large_cell_alone() -> None:
    """Figures without a queue hid for months what the default profile takes with one."""
    idle_run, contended_run = (
        large_cells.measure("5x8", 60, Case(DEFAULT, contended)) for contended in (False, True)
    )
    assert idle_run.most_waiting < contended_run.most_waiting
    assert contended_run.figures.unfinished_jobs == 0


def test_answers_are_asked_of_a_cell_whose_queue_stands() -> None:
    """`why` and `queue` come from the gateway's own routes, each from a state that is one record newer."""
    found = answers.measure(TINY.nodes, TINY.waiting, TINY.answers)
    assert TINY.waiting / 2 <= found.waiting <= TINY.waiting
    assert len(found.why_ms) == len(found.queue_ms) == TINY.answers
    assert min(found.why_ms + found.queue_ms) > 0
    values = run_answers(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "answers"}


def test_the_time_of_a_command_is_that_of_its_own_process() -> None:
    """A command that fails must not count as a fast one, and one without a gateway does."""
    assert 10 < commands.cpu_ms(commands.COMMANDS["help"], "http://127.0.0.1:1") < 60_000
    with pytest.raises(AssertionError):
        commands.cpu_ms(commands.COMMANDS["get_jobs"], "http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.postgres
def test_the_bench_of_commands_asks_a_live_gateway() -> None:
    values = run_commands(TINY)
    assert set(values) == {name for name, goal in GOALS.items() if goal.bench == "commands"}
    assert all(value > 10 for value in values.values())


def test_instructions_of_the_core_are_counted_alike_each_time() -> None:
    """A count that moved from run to run would be no better than a time."""
    case = Case(DEFAULT, contended=True)
    first, second = (bytecodes.of_core(case, TINY.nodes, 20, TINY.waiting) for _ in range(2))
    assert first == second > 100


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
    """In the window the burst and all that come after it wait; without one all have their place at once, so
    both ends of a task find the same work."""
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
    load = pipeline.Load(TINY.nodes, TINY.rate_per_s, TINY.seconds, run_ms=100.0)
    run = await pipeline.measure("embedded", Case(DEFAULT, contended=False), load)
    assert run.jobs == len(run.latencies_ms) == round(TINY.seconds * TINY.rate_per_s)
    assert 0 < quantile(run.latencies_ms, 0.5) < 10_000
    assert set(run.cpu_us_per_job) == {"postgres", "services"}


@pytest.mark.slow
@pytest.mark.postgres
async def test_in_the_contended_pipeline_gpus_pass_from_job_to_job() -> None:
    """Two nodes of 8 GPUs and 40 jobs at once: every further job takes over a GPU that another has left."""
    load = pipeline.contended(TINY.seconds, nodes=2, waiting=40)._replace(run_ms=100.0)
    run = await pipeline.measure("embedded", Case(DEFAULT, contended=True), load)
    assert run.jobs == 40 + round(TINY.seconds * load.rate_per_s)
    assert len(run.vacant_ms) == run.jobs - 2 * pipeline.GPUS_PER_NODE
    assert min(run.vacant_ms) >= 0


def test_one_bench_replaces_its_own_rows_of_the_table_and_no_others() -> None:
    """Somebody measures his part again on a quiet machine; what the rest took a night to measure must
    stay."""
    page = (
        "before\n<!-- measured -->\n| name | value | unit | reach | |\n|---|---:|---|---:|---|\n"
        "| `placer_core_p99_ms_liquid_idle` | 0.194 | ms | ≤ 1 | met |\n| "
        "`machine_calibration_ms_core_liquid_idle` | 21 | ms |  |  |\n"
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
        "| `placer_core_p99_ms_liquid_idle` | 0.194 | ms | ≤ 1 | met |",
        "| `machine_calibration_ms_core_liquid_idle` | 21 | ms |  |  |",
        "| `placer_restart_s` | 2.5 | s | ≤ 2 | not met |",
        "| `machine_calibration_ms_restart` | 19 | ms |  |  |",
        "| `idle_rss_mib` | 1,234 | MiB |  | not met |",
    ]
    assert into_readme(found, []) == found


def test_every_figure_has_a_bench_and_every_bench_runs_somewhere() -> None:
    """A figure that no bench reports would silently vanish from bench.json."""
    assert set(RUNS) == set(BENCHES)
    named = {
        "placer_core_events_per_s_penstock_contended",
        "pipeline_jobs_per_s_kafka_penstock_idle",
        "placer_restart_s",
        "idle_messages_per_min",
    }
    assert named <= set(GOALS)
    assert GOALS["placer_restart_s"].met(1.9)
    assert not GOALS["placer_restart_s"].met(2.1)
    assert GOALS["pipeline_jobs_per_s_kafka_penstock_idle"].met(1_000)
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
    """The bench replaces names of the service's shell; it must still see every estimate, alone, together and
    meanwhile."""
    found = await estimator.measure(TINY.runs, TINY.nodes, TINY.estimates, TINY.at_once, times=1)
    assert len(found.one) == len(found.answered) == TINY.estimates
    assert 0 < found.together[0] <= found.at_once[0] < found.at_once_appended[0]
    assert 0 < found.training_cpu_s < 60
    assert len(found.one_training) == len(found.answered_training) > 0
    assert 20 < found.rss_mib < 1_000
    assert min(found.forest) > 0
