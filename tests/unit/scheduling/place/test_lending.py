"""Stories of reserved cores under profile `penstock`: jobs without GPUs borrow them, and give them back to
trainings that find no room."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ledger.fold.plans import units_of_reclaim
from penstock.model.decisions.arrays import CoresReclaimed
from penstock.model.decisions.plans import BatchWindowOpened, PlanAdopted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import Coda, PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate
from penstock.scheduling.stop_cost import LOSES_MS
from penstock_services.placer.core.step import Step
from tests.support.cluster import builders as b
from tests.support.cluster.array_cell import MINUTE_MS, node, stopped, until_all_have_ended
from tests.support.cluster.driver import CellDriver


def cell(*nodes: NodeSpec, batch_window_ms: int = 0, **coda: float) -> CellDriver:
    """Three cores are reserved for each GPU until there is a history."""
    chosen = PlacerSettings(profile="penstock", batch_window_ms=batch_window_ms, coda=Coda(**coda))
    driver = CellDriver(chosen)
    driver.join(*nodes)
    return driver


def submit(
    driver: CellDriver, job_id: str, gpus: int, cores: int, owner: str = "ada", *, saves: bool = True
) -> Step:
    spec = JobSpec(command=("train",), owner=owner, checkpoint="signal" if saves else "none")
    need = Estimate(worker=b.need(gpus=gpus, cores=cores), confidence=1.0, tier="user", source="a test")
    return driver.submit(job_id, spec, need)


def run(driver: CellDriver, job_id: str, gpus: int, cores: int, *, saves: bool = True) -> None:
    """Submitted, placed and started."""
    submit(driver, job_id, gpus, cores, saves=saves)
    driver.start(job_id)


def reclaimed(step: Step) -> list[str]:
    """Who gives cores back."""
    return [fact.job_id for fact in step.facts if isinstance(fact, CoresReclaimed)]


def test_a_training_gets_back_what_its_node_reserves() -> None:
    """Of 28 cores 15 are reserved for 5 GPUs. Inference has its own 13, and borrows the rest: a training of
    four cores finds none, and the job that borrowed last stops for it."""
    driver = cell(node("n0"))
    run(driver, "own", 0, 13)
    run(driver, "lent", 0, 15)
    assert (driver.job("own").array.borrows, driver.job("lent").array.borrows) == (False, True)
    assert reclaimed(submit(driver, "training", 1, 4)) == ["lent"]
    submit(driver, "other", 0, 2)
    assert driver.job("other").status is JobStatus.QUEUED, "what is given back is not for it"
    stopped(driver, "lent")
    assert driver.job("training").status is JobStatus.LAUNCHING
    assert not driver.state.planned


@pytest.mark.parametrize("saves", [True, False])
def test_who_does_not_save_gives_cores_back_only_while_there_is_little_to_lose(saves: bool) -> None:
    """It has run for an hour: all of that would be done again. A job that saves has nothing to lose at any
    time."""
    for ran_ms, given_back in ((LOSES_MS - MINUTE_MS, True), (LOSES_MS + MINUTE_MS, saves)):
        driver = cell(node("n0", gpus=1, cores=4))
        run(driver, "lent", 0, 4, saves=saves)
        driver.at(ran_ms)
        assert bool(reclaimed(submit(driver, "training", 1, 3))) == given_back


def test_jobs_without_gpus_go_where_fewest_cores_are_missed() -> None:
    """Reserved cores do not change where they go: to the node on which most are left beside those that free
    GPUs will want."""
    driver = cell(node("n0"), node("n1", gpus=0, cores=20))
    run(driver, "a", 0, 4)
    [task] = driver.job("a").tasks.values()
    assert task.place.node_id == "n1"


def test_a_reservation_and_cores_that_are_given_back_do_not_undo_each_other() -> None:
    """A gang has waited until a node is reserved for it, a training then takes back cores on another node:
    both stay reserved until they start, and the borrower is stopped once."""
    driver = cell(node("n0", gpus=4, cores=28), node("n1", gpus=1, cores=4))
    run(driver, "small", 1, 5)
    submit(driver, "gang", 4, 28)
    driver.at(100 * 60 * MINUTE_MS)
    run(driver, "lent", 0, 4)
    assert [unit.job_id for unit in driver.state.planned.values()] == ["gang"]
    assert reclaimed(submit(driver, "training", 1, 4, owner="bob")) == ["lent"]
    assert [unit.job_id for unit in units_of_reclaim(driver.state)] == ["training"]
    again = submit(driver, "more", 0, 1)
    assert reclaimed(again) == []
    assert set(driver.state.planned) == {"gang", "training"}
    stopped(driver, "lent")
    assert driver.job("training").status is JobStatus.LAUNCHING
    assert set(driver.state.planned) == {"gang"}


def test_who_has_waited_longest_and_gets_cores_back_has_its_nodes_once() -> None:
    """The training for which a borrower stops has itself waited so long that nodes would be reserved for it:
    the plan names it once, and is not adopted again with each arrival."""
    driver = cell(node("n0", gpus=1, cores=4), node("n1", gpus=0, cores=2))
    run(driver, "lent", 0, 4)
    submit(driver, "training", 1, 4)
    driver.at(300 * 60 * MINUTE_MS)
    step = submit(driver, "poke", 0, 1)
    assert [unit.job_id for unit in driver.state.planned.values()] == ["training"]
    assert not any(isinstance(fact, PlanAdopted) for fact in step.facts)


def test_no_plan_of_who_shares_gpus_is_awaited_where_cores_are_short() -> None:
    """A job finds no cores, though GPUs are free: taking turns would bring it nothing, so no window opens.
    Where GPUs are short one does. When the other job has ended none are."""
    for gpus, opens in ((1, False), (2, True)):
        driver = cell(node("n0", gpus=2, cores=4), batch_window_ms=3_000)
        run(driver, "a", 1, 4)
        step = submit(driver, "b", gpus, 4)
        assert driver.job("b").status is JobStatus.QUEUED
        assert any(isinstance(fact, BatchWindowOpened) for fact in step.facts) == opens
        driver.at(10_000)
        driver.exit("a.1.w0")
        assert driver.job("b").status is JobStatus.LAUNCHING


JOBS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 4, 5]), st.integers(1, 16), st.booleans()),
    min_size=4,
    max_size=30,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs=JOBS, order=st.randoms(use_true_random=False), nodes=st.integers(1, 3))
def test_all_jobs_end_whatever_comes(jobs: list[tuple[int, int, bool]], order: object, nodes: int) -> None:
    """Jobs come, and end in any order, beside nodes that are reserved for who waits long; the driver checks
    the state after every step. All start, and none gives back cores more often than allowed."""
    driver = cell(*(node(f"n{i}") for i in range(nodes)))
    coming = [
        partial(submit, driver, f"j{i}", gpus, max(cores, gpus), saves=saves)
        for i, (gpus, cores, saves) in enumerate(jobs)
    ]
    for minutes in until_all_have_ended(driver, coming, order, 20):
        assert all(job.array.reclaims <= 3 for job in driver.state.jobs.values())
        assert minutes < 1_000 * len(jobs)
