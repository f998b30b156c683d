"""Every figure that `make bench` reports: its unit, what is to be reached, and which bench measures it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.bench.cases import CASES, DEFAULT, HISTORY, Case


@dataclass(frozen=True, slots=True)
class Goal:
    """`limit` is the least ("≥") or the most ("≤") that is acceptable; None: reported, not judged."""

    unit: str
    bench: str
    sense: Literal["≥", "≤", ""] = ""
    limit: float | None = None

    @property
    def reach(self) -> str | None:
        return None if self.limit is None else f"{self.sense} {self.limit:g}"

    def met(self, value: float) -> bool | None:
        """None where nothing is asked."""
        if self.limit is None:
            return None
        return value >= self.limit if self.sense == "≥" else value <= self.limit


def _core(case: Case) -> dict[str, Goal]:
    bench = f"core_{case}"
    judged = case.profile == HISTORY and not case.contended
    return {
        f"placer_core_events_per_s_{case}": Goal("events/s", bench, *(("≥", 5_000) if judged else ())),
        f"placer_core_p99_ms_{case}": Goal("ms", bench, *(("≤", 1) if judged else ())),
    }


def _submit(log: str, p50_ms: float, p99_ms: float) -> dict[str, Goal]:
    return {
        f"submit_to_start_p50_ms_{log}": Goal("ms", f"submit_{log}", "≤", p50_ms),
        f"submit_to_start_p99_ms_{log}": Goal("ms", f"submit_{log}", "≤", p99_ms),
    }


def _pipeline(log: str, case: Case) -> dict[str, Goal]:
    end = f"{log}_{case}"
    bench = f"pipeline_{end}"
    found = {
        f"pipeline_cpu_us_per_job_{end}": Goal("µs", bench),
        f"pipeline_others_cores_{end}": Goal("cores", bench),
    }
    if case.contended:
        return {
            f"pipeline_jobs_per_s_{end}": Goal("jobs/s", bench),
            f"pipeline_vacant_p50_ms_{end}": Goal("ms", bench),
            f"pipeline_vacant_p99_ms_{end}": Goal("ms", bench),
            **found,
        }
    return {
        f"pipeline_jobs_per_s_{end}": Goal("jobs/s", bench, "≥", 1_000),
        f"pipeline_start_p50_ms_{end}": Goal("ms", bench),
        f"pipeline_start_p99_ms_{end}": Goal("ms", bench, "≤", 150),
        f"pipeline_backlog_growth_jobs_{end}": Goal("jobs", bench, "≤", 100),
        **found,
    }


def _per_log(log: str, p50_ms: float, p99_ms: float) -> dict[str, Goal]:
    return _submit(log, p50_ms, p99_ms) | _of_cases(lambda case: _pipeline(log, case))


def _of_cases(goals: Callable[[Case], dict[str, Goal]]) -> dict[str, Goal]:
    return {name: goal for case in CASES for name, goal in goals(case).items()}


def _answers(route: str) -> dict[str, Goal]:
    """With 4,500 waiting jobs, under the default profile."""
    return {
        f"{route}_p50_ms_{DEFAULT}_contended": Goal("ms", "answers", "≤", 20),
        f"{route}_p99_ms_{DEFAULT}_contended": Goal("ms", "answers"),
    }


def _command(name: str) -> dict[str, Goal]:
    return {
        f"command_{name}_cpu_least_ms": Goal("ms", "commands", "≤", 350),
        f"command_{name}_cpu_p50_ms": Goal("ms", "commands"),
    }


def _simulator(profiles: tuple[str, ...]) -> dict[str, Goal]:
    return {
        name: goal
        for profile in profiles
        for name, goal in (
            (f"simulator_events_per_s_{profile}", Goal("events/s", "simulator")),
            (f"simulator_10x_jobs_ratio_{profile}", Goal("×", "simulator", "≤", 1.5)),
        )
    }


GOALS: dict[str, Goal] = {
    **_of_cases(_core),
    "placer_core_10k_nodes_ratio": Goal("×", f"core_{HISTORY}_idle", "≤", 2),
    "fold_records_per_s": Goal("records/s", f"core_{HISTORY}_idle", "≥", 50_000),
    **_of_cases(lambda case: {f"large_cell_events_per_s_{case}": Goal("events/s", f"large_cells_{case}")}),
    **_answers("why"),
    **_answers("queue"),
    **_command("help"),
    **_command("get_jobs"),
    **_simulator(("fifo", "liquid", "srtf", "srsf", "tiresias")),
    "planner_muri_ms": Goal("ms", "planner", "≤", 50),
    "planner_interleave_ms": Goal("ms", "planner", "≤", 50),
    "planner_weight_ratio": Goal("×", "planner", "≥", 0.999),
    "planner_distinct_ms": Goal("ms", "planner", "≤", 1_000),
    "planner_distinct_interleave_ms": Goal("ms", "planner", "≤", 1_000),
    "planner_distinct_weight_ratio": Goal("×", "planner", "≥", 0.999),
    "burst_200_jobs_128_nodes_ms": Goal("ms", "bursts", "≤", 500),
    "burst_200_jobs_128_nodes_published_ms": Goal("ms", "bursts", "≤", 500),
    "burst_cost_ratio": Goal("×", "bursts", "≤", 1),
    "window_ends_p99_ratio": Goal("×", "window", "≤", 1.25),
    "window_starts_p99_ratio": Goal("×", "window", "≤", 1.25),
    "window_arrivals_p99_ratio": Goal("×", "window"),
    **_per_log("embedded", 12, 40),
    **_per_log("kafka", 20, 60),
    "placer_restart_s": Goal("s", "restart", "≤", 2),
    "placer_restart_without_snapshot_s": Goal("s", "restart"),
    "estimator_one_p50_ms": Goal("ms", "estimator"),
    "estimator_one_p99_ms": Goal("ms", "estimator", "≤", 1),
    "estimator_one_cpu_p99_ms": Goal("ms", "estimator"),
    "estimator_one_forest_ms": Goal("ms", "estimator"),
    "estimator_forest_ratio": Goal("×", "estimator", "≥", 5),
    "estimator_answer_p99_ms": Goal("ms", "estimator"),
    "estimator_1000_model_ms": Goal("ms", "estimator", "≤", 50),
    "estimator_1000_model_cpu_ms": Goal("ms", "estimator"),
    "estimator_1000_tiers_ms": Goal("ms", "estimator"),
    "estimator_1000_tiers_cpu_ms": Goal("ms", "estimator"),
    "estimator_1000_appended_ms": Goal("ms", "estimator"),
    "estimator_training_cpu_s": Goal("s", "estimator", "≤", 10),
    "estimator_training_s": Goal("s", "estimator"),
    "estimator_training_one_p99_ms": Goal("ms", "estimator"),
    "estimator_training_ready_p99_ms": Goal("ms", "estimator"),
    "estimator_training_answer_p50_ms": Goal("ms", "estimator"),
    "estimator_training_answer_p99_ms": Goal("ms", "estimator", "≤", 5),
    "estimator_rss_mib": Goal("MiB", "estimator"),
    "estimator_others_cores": Goal("cores", "estimator"),
    "steps_training_cpu_s": Goal("s", "steps", "≤", 10),
    "steps_reading_cpu_ms": Goal("ms", "steps"),
    "steps_one_cpu_p50_ms": Goal("ms", "steps"),
    "steps_one_cpu_p99_ms": Goal("ms", "steps", "≤", 1),
    "steps_1000_cpu_ms": Goal("ms", "steps", "≤", 50),
    "steps_eta_cpu_p50_ms": Goal("ms", "steps"),
    "steps_eta_cpu_p99_ms": Goal("ms", "steps", "≤", 5),
    "idle_rss_mib": Goal("MiB", "idle", "≤", 300),
    "idle_messages_per_min": Goal("1/min", "idle", "≤", 0),
    "idle_cpu_percent": Goal("%", "idle", "≤", 0.5),
    "idle_postgres_mib": Goal("MiB", "idle"),
    "idle_postgres_cpu_percent": Goal("%", "idle"),
}

BENCHES = tuple(dict.fromkeys(goal.bench for goal in GOALS.values()))
"""In the order in which they run."""
