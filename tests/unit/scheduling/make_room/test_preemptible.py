"""A job with `preemptible: false` runs on under every profile that stops jobs; those that may be stopped make
way in its place."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.scheduling.profiles import profile_for
from tests.support.cluster.driver import CellDriver, estimate, job_spec
from tests.unit.scheduling.make_room.test_replan import cell, running, settle

PREEMPTIVE = sorted(
    name for name in profiles.names() if profile_for(PlacerSettings(profile=name)).preempt is not None
)


def submit(driver: CellDriver, job_id: str, gpus: int, run_s: float, *, preemptible: bool = True) -> None:
    need = msgspec.structs.replace(estimate(gpus), run_ms=round(run_s * 1_000))
    driver.submit(job_id, job_spec(preemptible=preemptible), need)
    settle(driver)


def test_another_one_gives_way_in_its_place() -> None:
    """It has the longest time to go and would be first; the next one after it is stopped instead."""
    driver = cell("srtf", nodes=2)
    submit(driver, "demo", 4, 36_000, preemptible=False)
    submit(driver, "night", 4, 30_000)
    submit(driver, "short", 4, 60)
    assert running(driver) == {"demo", "short"}


def test_a_job_whose_service_is_due_runs_on_under_tiresias() -> None:
    """Both have left the first queue when a new job comes: the one that may be stopped makes way."""
    driver = cell("tiresias", nodes=2, profile_settings='{"queue_limits_gpu_s": [10]}')
    submit(driver, "night", 4, 36_000)
    submit(driver, "demo", 4, 36_000, preemptible=False)
    driver.at(60_000)
    settle(driver)
    submit(driver, "new", 4, 60)
    assert running(driver) == {"demo", "new"}
    submit(driver, "newer", 4, 60)
    assert running(driver) == {"demo", "new"}


JOB = st.tuples(st.integers(1, 4), st.integers(10, 1_000), st.booleans())


@pytest.mark.parametrize("profile", PREEMPTIVE)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(JOB, min_size=4, max_size=8))
def test_none_is_ever_stopped_and_plans_come_to_an_end(
    profile: str, jobs: list[tuple[int, int, bool]]
) -> None:
    """Crowds of jobs, half of them not to be stopped, under every profile that stops jobs."""
    driver = cell(profile, nodes=2, profile_settings='{"queue_limits_gpu_s": [10]}')
    fixed = []
    for number, (gpus, run_s, preemptible) in enumerate(jobs):
        submit(driver, f"j{number}", gpus, run_s, preemptible=preemptible)
        fixed += [] if preemptible else [f"j{number}"]
        driver.at(20_000 * (number + 1))
        settle(driver)
    assert all(driver.job(job_id).attempt <= 1 for job_id in fixed)
