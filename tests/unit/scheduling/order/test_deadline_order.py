"""Deadlines within tenants' shares: who can be in time comes first, and a deadline gives no tenant more than
its share."""

from operator import attrgetter
from typing import Any

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.profiles import profile_for
from tests.support.cluster.driver import CellDriver, node_spec
from tests.unit.scheduling.make_room.test_preemption import needing

SETTINGS = PlacerSettings(profile="penstock")


def cell() -> CellDriver:
    """One node of four GPUs, all of them in use."""
    driver = CellDriver(SETTINGS)
    driver.join(node_spec("n0", 4))
    job(driver, "runs", 4, 36_000, owner="zoe")
    driver.start("runs")
    return driver


def job(driver: CellDriver, job_id: str, gpus: int, run_s: float, **more: Any) -> None:
    fields: dict[str, Any] = {"command": ("x",)}
    driver.submit(job_id, JobSpec(**fields | more), needing(gpus, run_s))


def order(driver: CellDriver) -> list[str]:
    stage = profile_for(SETTINGS).order
    assert stage is not None
    one = list(stage.order(driver.state))
    waiting = [driver.job(job_id) for job_id in driver.state.queue.values()]
    turns = stage.ranking(driver.state, waiting).turns(driver.now_ms)
    assert [waits.job_id for waits in turns] == one, "forecasts use the same order"
    return one


def test_who_may_wait_least_comes_first() -> None:
    """Three hours to go for the one, and one hour for the other, which came later; the oldest has no
    deadline."""
    driver = cell()
    job(driver, "usual", 1, 600)
    job(driver, "later", 1, 600, deadline_ms=3 * 3_600_000)
    job(driver, "sooner", 1, 600, deadline_ms=3_600_000)
    assert order(driver) == ["sooner", "later", "usual"]


def test_who_is_late_waits_like_all_others() -> None:
    driver = cell()
    job(driver, "usual", 1, 600)
    job(driver, "late", 2, 600, deadline_ms=1_000)
    assert order(driver) == ["usual", "late"]


def test_a_deadline_gives_no_tenant_more_than_its_share() -> None:
    """Zoe holds the whole cell. Her next job is due soon, and Ada's job without a deadline comes first all
    the same."""
    driver = cell()
    job(driver, "due", 1, 600, owner="zoe", deadline_ms=1_200_000)
    job(driver, "other", 1, 600, owner="ada")
    assert order(driver) == ["other", "due"]


def test_each_stage_can_be_left_out() -> None:
    whole = profile_for(SETTINGS)
    stages = {
        "backfill": "backfill",
        "bursts": "batch",
        "groups": "regroup",
        "moves": "migrate",
        "prelaunch": "prelaunch",
        "cores": "guard.step",
        "eliminator": "guard.eliminates",
    }
    for name, field in stages.items():
        assert attrgetter(field)(whole)
        left = profile_for(PlacerSettings(profile="penstock", without=(name,)))  # type: ignore[arg-type]
        assert not attrgetter(field)(left)
        assert all(attrgetter(other)(left) for other in stages.values() if other != field)
    assert profile_for(PlacerSettings(profile="penstock", without=("cores", "eliminator"))).guard is None
    driver = cell()
    job(driver, "usual", 1, 600)
    job(driver, "due", 2, 600, deadline_ms=3_600_000)
    without = profile_for(PlacerSettings(profile="penstock", without=("deadlines",))).order
    assert without is not None
    assert list(without.order(driver.state)) == ["usual", "due"]
