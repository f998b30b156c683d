"""Interleaving in a saturated cell of several tenants: who is listed for the search, and in which order."""

from typing import Any

from msgspec.structs import replace

from penstock.model.inputs.external_events import JobProgress, WorkProgressed
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, StageTimes
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.scheduling.groups.fair_interleave import FairInterleave
from penstock.scheduling.stages.regroup import Question
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.unit.scheduling.make_room.test_preemption import needing

HOUR_MS = 3_600_000


def cell(gpus: int = 4) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile="penstock"))
    driver.join(node_spec("n0", gpus))
    return driver


def job(driver: CellDriver, job_id: str, gpus: int, run_s: float, *, runs: bool = False, **more: Any) -> None:
    fields: dict[str, Any] = {"command": ("x",), "checkpoint": "signal"}
    driver.submit(job_id, JobSpec(**fields | more), needing(gpus, run_s))
    if runs:
        driver.start(job_id)


def profiled() -> Estimate:
    """One GPU; stages are known, the run time is not."""
    stages = StageTimes(storage_ms=0, cpu_ms=0, gpu_ms=90, network_ms=0, iteration_ms=100)
    return replace(estimate(1), stages=stages)


def asked(driver: CellDriver) -> Question | None:
    return FairInterleave().question(driver.state)


def listed(driver: CellDriver) -> list[str]:
    found = asked(driver)
    assert found is not None
    return [one.job_id for one in found.jobs]


def planned(driver: CellDriver) -> list[str]:
    """Ids of the jobs that are to run."""
    found = asked(driver)
    assert found is not None
    return [job_id for group in FairInterleave().solve(found).groups for job_id in group.job_ids]


def replaced(driver: CellDriver, stopped: str, started: str) -> None:
    """A plan stops the one job for the other, which starts."""
    unit = ProposedUnit(jobs=(ProposedJob(job_id=started, nodes=("n0",)),), explanation="now it")
    driver.feed(PlanProposed(proposal_id="p", proposer="batcher", units=(unit,), stops=(stopped,)))
    driver.exit(f"{stopped}.1.w0", None, cause="stopped", signal=15)
    driver.start(started)


def test_no_job_is_regrouped_while_there_are_gpus_for_all() -> None:
    driver = cell()
    job(driver, "one", 1, 600, runs=True)
    assert asked(driver) is None
    job(driver, "four", 4, 600)
    assert listed(driver) == ["one", "four"]


def test_a_tenant_with_many_short_jobs_does_not_keep_another_from_its_share() -> None:
    """Ada's CI has filled the cell with short jobs, and more of them wait. Bob's training takes two hours: by
    run times alone it would come last for as long as CI runs."""
    driver = cell()
    for number in range(4):
        job(driver, f"ci{number}", 1, 300, runs=True, owner="ada")
    for number in range(4, 8):
        job(driver, f"ci{number}", 1, 300, owner="ada")
    job(driver, "training", 2, 7_200, owner="bob")
    order = listed(driver)
    assert order.index("training") == 2, "after as many of Ada's as are half of the GPUs"
    assert set(order[:2]) <= {"ci0", "ci1", "ci2", "ci3"}


def test_within_a_tenant_the_higher_priority_comes_first() -> None:
    driver = cell()
    job(driver, "runs", 4, 36_000, runs=True)
    job(driver, "brief", 1, 60)
    job(driver, "important", 1, 600, priority=5)
    assert listed(driver) == ["important", "brief", "runs"]


def test_who_waits_comes_earlier_with_time() -> None:
    """A long job waits; short ones go on coming. By run times alone it would never run."""
    driver = cell()
    job(driver, "runs", 4, 3_600_000, runs=True)
    job(driver, "long", 4, 7_200)
    driver.at(driver.now_ms + 7 * 24 * HOUR_MS)
    job(driver, "shorter", 4, 3_000)
    assert listed(driver)[0] == "long"


def test_a_job_of_unknown_run_time_does_not_lose_its_gpus_to_its_equals() -> None:
    """No run time is known, and no job has run for an hour: all are in the first queue, in order of arrival,
    however long they wait. The running one goes on, also `second`, for which a plan stopped `first` after 25
    minutes."""
    driver = cell(1)
    alike = profiled()
    for job_id in ("first", "second"):
        driver.submit(job_id, JobSpec(command=("x",), checkpoint="signal"), alike)
    driver.start("first")
    driver.at(1_500_000)
    driver.submit("third", JobSpec(command=("x",), checkpoint="signal"), alike)
    assert (listed(driver), planned(driver)) == (["first", "second", "third"], ["first"])
    replaced(driver, "first", "second")
    driver.at(2_400_000)
    driver.submit("fourth", JobSpec(command=("x",), checkpoint="signal"), alike)
    assert (listed(driver), planned(driver)) == (["first", "second", "third", "fourth"], ["second"])


def test_of_jobs_of_unknown_run_time_that_have_run_long_the_longest_comes_last() -> None:
    """One has run for a week, one for a day, and a third comes: the longer a job has run, the longer it is
    expected to run still."""
    driver = cell(2)
    for job_id, at_h in (("week", 0), ("day", 6 * 24)):
        driver.at(at_h * HOUR_MS)
        driver.submit(job_id, JobSpec(command=("x",), checkpoint="signal"), profiled())
        driver.start(job_id)
    driver.at(7 * 24 * HOUR_MS)
    driver.submit("new", JobSpec(command=("x",), checkpoint="signal"), profiled())
    assert listed(driver) == ["new", "day", "week"]


def test_a_job_that_was_stopped_keeps_its_place_by_the_time_that_it_had() -> None:
    """`first` runs for a minute and reports its first ten seconds. Were only these ten to count once it is
    stopped, it would be first in its queue again, take the place of the job that came for it, and so on
    without end."""
    driver = cell(1)
    for job_id in ("first", "second"):
        driver.submit(job_id, JobSpec(command=("x",), checkpoint="signal"), estimate(1))
    driver.start("first")
    driver.at(10_000)
    report = JobProgress(job_id="first", attained_s=10.0)
    driver.feed(WorkProgressed(node_id="n0", jobs=(report,)))
    driver.at(60_000)
    replaced(driver, "first", "second")
    found = asked(driver)
    assert found is not None
    assert {one.job_id: one.attained_s for one in found.jobs} == {"second": 0.0, "first": 60.0}


def test_a_gang_that_has_waited_long_does_not_pass_its_own_tenants_jobs() -> None:
    """A tenant alone in the cell: its first jobs are the whole share of the GPUs, and a small job comes right
    after them. A gang that has waited for weeks and still comes behind it in the tenant's own order stays
    there: no share of anybody else delays it. In a cell whose queue grows all gangs have waited so long, and
    the small ones would never run."""
    driver = cell(16)
    job(driver, "runs", 16, 36_000_000, runs=True)
    job(driver, "gang", 8, 400_000)
    driver.at(driver.now_ms + 1_000 * HOUR_MS)
    for name in ("short-0", "short-1"):
        job(driver, name, 8, 60)
    job(driver, "small", 1, 3_000)
    order = listed(driver)
    assert set(order[:2]) == {"short-0", "short-1"}
    assert order[2:] == ["small", "gang", "runs"]


def test_a_gang_that_has_waited_long_passes_the_jobs_of_tenants_beyond_their_share() -> None:
    """Bob's jobs run on more than half of the GPUs, and his gang, the next of his in order, has waited for
    weeks: it comes before those of Ada that are beyond her share."""
    driver = cell(16)
    job(driver, "runs", 16, 36_000_000, runs=True, owner="bob")
    job(driver, "gang", 8, 40_000, owner="bob")
    driver.at(driver.now_ms + 1_000 * HOUR_MS)
    job(driver, "first", 8, 60, owner="bob")
    for number in range(3):
        job(driver, f"ada-{number}", 8, 100, owner="ada")
    order = listed(driver)
    assert order.index("gang") < order.index("ada-1")


def test_a_job_that_does_not_save_is_not_stopped_and_may_get_company() -> None:
    driver = cell()
    job(driver, "loses", 4, 36_000, runs=True, checkpoint="none")
    job(driver, "short", 4, 60)
    found = asked(driver)
    assert found is not None
    assert [(one.job_id, one.movable) for one in found.jobs] == [("loses", False), ("short", True)]
    answer = FairInterleave().solve(found)
    assert "loses" in {job_id for group in answer.groups for job_id in group.job_ids}


def test_a_job_that_runs_gives_way_only_to_one_that_is_much_shorter() -> None:
    driver = cell()
    job(driver, "runs", 4, 3_600, runs=True)
    job(driver, "half", 4, 1_800)
    assert listed(driver) == ["runs", "half"]
    job(driver, "tenth", 4, 360)
    assert listed(driver) == ["tenth", "runs", "half"]


def test_room_is_left_for_a_job_with_a_deadline() -> None:
    """It is placed by deadlines and not by the search, so the search must not plan with its GPUs."""
    driver = cell()
    for number in range(4):
        job(driver, f"j{number}", 1, 36_000, runs=True)
    job(driver, "waits", 1, 36_000)
    found = asked(driver)
    assert found is not None
    assert sum(found.node_gpus) == 4
    job(driver, "due", 2, 600, deadline_ms=HOUR_MS)
    found = asked(driver)
    assert found is not None
    assert "due" not in {one.job_id for one in found.jobs}
    assert sum(found.node_gpus) == 2
