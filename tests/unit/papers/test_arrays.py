"""Resource arrays: who belongs where, what is borrowed and given back, sizes from history, and that no job
waits for ever."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.arrays import ArraysSized, CoresReclaimed
from penstock.model.decisions.ledger_events import PlacementDecided, StopDecided
from penstock.model.decisions.moves import MAX_MIGRATIONS, MoveDecided
from penstock.model.inputs.external_events import NodeCordoned
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import Coda
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate
from penstock.scheduling.place.arrays import large_nodes
from penstock.why.explain import explain
from penstock_papers.settings import CodaSettings
from penstock_services.placer.core.step import Step
from tests.support.cluster import builders as b
from tests.support.cluster.array_cell import MINUTE_MS, node, stopped, until_all_have_ended
from tests.support.cluster.driver import CellDriver
from tests.support.own_settings import with_own


def cell(*nodes: NodeSpec, patience_ms: int | None = None, **coda: float) -> CellDriver:
    """Three cores are reserved for each GPU until there is a history."""
    own = CodaSettings() if patience_ms is None else CodaSettings(patience_ms=patience_ms)
    driver = CellDriver(with_own("coda", own, coda=Coda(**coda)))  # type: ignore[arg-type]
    driver.join(*nodes)
    return driver


def submit(
    driver: CellDriver, job_id: str, gpus: int, cores: int, owner: str = "ada", workers: int = 1
) -> Step:
    """Trainings save when they are stopped, jobs without GPUs do not."""
    saves = "signal" if gpus else "none"
    spec = JobSpec(command=("train",), owner=owner, workers=workers, checkpoint=saves)
    need = b.need(gpus=gpus, cores=cores)
    return driver.submit(job_id, spec, Estimate(worker=need, confidence=1.0, tier="user", source="a test"))


def run(driver: CellDriver, job_id: str, gpus: int, cores: int, owner: str = "ada") -> JobState:
    """Submitted, placed and started."""
    submit(driver, job_id, gpus, cores, owner)
    assert driver.job(job_id).status is JobStatus.LAUNCHING, job_id
    driver.start(job_id)
    return driver.job(job_id)


def node_of(driver: CellDriver, job_id: str) -> str:
    [task] = driver.job(job_id).tasks.values()
    return task.place.node_id


def end(driver: CellDriver, job_id: str) -> Step:
    [task_id] = driver.job(job_id).tasks
    return driver.exit(task_id)


def facts(step: Step, kind: type) -> list[object]:
    return [fact for fact in step.facts if isinstance(fact, kind)]


def test_jobs_without_gpus_keep_to_their_cores_and_borrow_when_these_are_given() -> None:
    """A node of 28 cores reserves 15 for its 5 GPUs. Inference takes the other 13; the next job borrows, and
    its placement is marked."""
    driver = cell(node("n0"))
    first = run(driver, "own", 0, 13)
    assert not first.array.borrows
    step = submit(driver, "lent", 0, 8)
    [placed] = facts(step, PlacementDecided)
    assert isinstance(placed, PlacementDecided)
    assert placed.borrows
    assert driver.explanations[-1].reason == "borrows 8 cores that are reserved for GPUs"
    state = driver.state.nodes["n0"]
    assert (state.reserved_cores, state.borrowed_cores) == (15, 8)


def test_a_training_gets_its_reserved_cores_back_and_who_gave_them_is_first_in_its_array() -> None:
    """At noon inference has borrowed all reserved cores. A training comes: the last borrower is aborted, not
    the owner of the CPU array's cores; it waits before a job of an owner who holds nothing, and starts
    first."""
    driver = cell(node("n0"))
    run(driver, "own", 0, 13)
    run(driver, "lent-1", 0, 7)
    run(driver, "lent-2", 0, 8)
    step = submit(driver, "training", 1, 4)
    [reclaimed] = facts(step, CoresReclaimed)
    assert isinstance(reclaimed, CoresReclaimed)
    assert (reclaimed.job_id, reclaimed.by_job_id) == ("lent-2", "training")
    [stop] = facts(step, StopDecided)
    assert isinstance(stop, StopDecided)
    assert stop.job_id == "lent-2"
    assert explain(driver.state, "training").reason is Reason.AWAITING_STOPS
    submit(driver, "other", 0, 8, owner="bob")
    assert driver.job("other").status is JobStatus.QUEUED
    stopped(driver, "lent-2")
    assert driver.job("training").status is JobStatus.LAUNCHING
    assert driver.job("lent-2").status is JobStatus.QUEUED
    assert "head of the CPU array" in explain(driver.state, "lent-2").claim
    end(driver, "lent-1")
    assert driver.job("lent-2").status is JobStatus.LAUNCHING
    assert driver.job("other").status is JobStatus.QUEUED


def test_a_job_gives_its_cores_back_at_most_so_often() -> None:
    """Trainings of a minute come one after the other: a borrower is aborted twice, as the setting has it, and
    then runs to its end."""
    driver = cell(node("n0", gpus=1, cores=4), max_reclaims=2)
    run(driver, "lent", 0, 4)
    for turn in range(2):
        step = submit(driver, f"t{turn}", 1, 3)
        assert len(facts(step, CoresReclaimed)) == 1
        stopped(driver, "lent")
        driver.start(f"t{turn}")
        assert driver.job("lent").status is JobStatus.QUEUED
        end(driver, f"t{turn}")
        driver.start("lent")
    assert driver.job("lent").array.reclaims == 2
    step = submit(driver, "t2", 1, 3)
    assert not facts(step, CoresReclaimed)
    assert driver.job("t2").status is JobStatus.QUEUED
    end(driver, "lent")
    assert driver.job("t2").status is JobStatus.LAUNCHING


def test_sizes_follow_the_largest_jobs_and_are_facts() -> None:
    """Two jobs of four GPUs at once: from the next decision on two nodes, those that joined last, are theirs.
    A replica that folds the facts has the same."""
    driver = cell(*(node(f"n{i}") for i in range(6)))
    assert driver.state.arrays.large_nodes == 0
    run(driver, "a", 4, 4)
    step = submit(driver, "b", 4, 4)
    sizes = [fact.large_nodes for fact in facts(step, ArraysSized) if isinstance(fact, ArraysSized)]
    assert sizes[-1:] == [2]
    assert large_nodes(driver.state) == driver.state.nodes["n4"].bit | driver.state.nodes["n5"].bit
    assert driver.follower.state.arrays == driver.state.arrays
    assert load(dump(driver.state)).arrays == driver.state.arrays


def test_reserved_cores_follow_what_trainings_were_given() -> None:
    """The cell begins with three cores per GPU. Trainings with one core each run for an hour: one is reserved
    then."""
    driver = cell(node("n0"))
    assert driver.state.nodes["n0"].reserved_cores == 15
    run(driver, "a", 5, 5)
    driver.at(3_600_000)
    end(driver, "a")
    assert driver.state.arrays.cores_per_gpu_milli == 1_000
    assert driver.state.nodes["n0"].reserved_cores == 5


def test_small_jobs_stay_out_of_the_large_array_until_theirs_is_full() -> None:
    """n1 is for jobs of four. Small jobs fill n0, then the fifth GPU of n1, then borrow there."""
    driver = cell(node("n0"), node("n1"))
    run(driver, "large", 4, 4)
    end(driver, "large")
    for i in range(7):
        run(driver, f"s{i}", 1, 1)
    assert [node_of(driver, f"s{i}") for i in range(7)] == ["n0"] * 5 + ["n1"] * 2


def test_small_jobs_leave_when_a_large_one_comes() -> None:
    """Two small trainings have borrowed on the node of the 4-GPU sub-array, and since then others in their
    own array have ended. A job of four comes: as many as it takes go on there, from their checkpoints; the
    large one starts when that is proven."""
    driver = cell(node("n0"), node("n1"))
    run(driver, "large", 4, 4)
    end(driver, "large")
    for i in range(7):
        run(driver, f"s{i}", 1, 1)
    for i in range(3):
        end(driver, f"s{i}")
    step = submit(driver, "next", 4, 4)
    [move] = facts(step, MoveDecided)
    assert isinstance(move, MoveDecided)
    assert (move.job_id, move.tasks[0].node_id) == ("s5", "n0")
    assert "for next" in move.reason
    stopped(driver, "s5")
    assert (node_of(driver, "s5"), node_of(driver, "next")) == ("n0", "n1")
    assert driver.job("s5").moves.migrations == 1


@pytest.mark.parametrize("why", ["no checkpoint", "moved enough", "nowhere to go"])
def test_training_is_never_stopped_but_to_go_on_elsewhere(why: str) -> None:
    """Two small trainings stand where a large one could: they stay if they would lose their work, or were
    moved often, or nothing is free for them."""
    driver = cell(node("n0"), node("n1"))
    run(driver, "large", 4, 4)
    end(driver, "large")
    for i in range(7):
        run(driver, f"s{i}", 1, 1)
    if why != "nowhere to go":
        end(driver, "s0")
    for name in ("s5", "s6"):
        if why == "no checkpoint":
            driver.state.jobs[name].spec = JobSpec(command=("train",), owner="ada")
        elif why == "moved enough":
            driver.state.jobs[name].moves = replace(driver.state.jobs[name].moves, migrations=MAX_MIGRATIONS)
    step = submit(driver, "next", 4, 4)
    assert not facts(step, StopDecided)
    assert driver.job("next").status is JobStatus.QUEUED


def test_large_jobs_overflow_into_the_small_array() -> None:
    """One node is for jobs of four; a second one at the same time takes a node of the others."""
    driver = cell(node("n0"), node("n1"), node("n2"))
    run(driver, "a", 4, 4)
    end(driver, "a")
    run(driver, "b", 4, 4)
    run(driver, "c", 4, 4)
    assert (node_of(driver, "b"), node_of(driver, "c")) == ("n2", "n1")


def test_owners_share_the_cores_of_the_cpu_array_and_the_gpus_of_the_other() -> None:
    """ada trains on four GPUs and bob on none, so the next GPU is bob's; for cores only jobs without GPUs
    count, and there bob holds most."""
    driver = cell(node("n0", gpus=5, cores=28))
    run(driver, "a-train", 4, 4)
    run(driver, "b-cpu", 0, 23, owner="bob")
    for name, owner in (("a1", "ada"), ("b1", "bob")):
        submit(driver, f"{name}-gpu", 1, 2, owner=owner)
        submit(driver, f"{name}-cpu", 0, 2, owner=owner)
    assert driver.job("a1-gpu").status is JobStatus.QUEUED
    line = [
        explain(driver.state, f"{name}-{kind}").position for kind in ("gpu", "cpu") for name in ("b1", "a1")
    ]
    assert line == [1, 2, 4, 3]


def test_who_waits_long_enough_gets_nodes_reserved() -> None:
    """Small jobs come and go so that four GPUs are never free at once; after an hour no other job starts on
    the large job's node."""
    driver = cell(node("n0", gpus=4, cores=16))
    for i in range(4):
        run(driver, f"s{i}", 1, 1)
    submit(driver, "large", 4, 4)
    driver.at(61 * MINUTE_MS)
    end(driver, "s0")
    submit(driver, "s4", 1, 1)
    assert driver.job("s4").status is JobStatus.QUEUED
    assert explain(driver.state, "s4").reason is not Reason.ABOUT_TO_START
    for i in range(1, 4):
        end(driver, f"s{i}")
    assert driver.job("large").status is JobStatus.LAUNCHING


def test_what_is_reserved_is_given_up_when_its_node_leaves_the_cell() -> None:
    """A node is cordoned while a borrower is being stopped there: the training starts elsewhere, and nothing
    stays reserved."""
    driver = cell(node("n0"), node("n1", gpus=0, cores=4))
    run(driver, "own", 0, 13)
    run(driver, "lent", 0, 15)
    submit(driver, "training", 1, 4)
    assert list(driver.state.planned) == ["training"]
    driver.feed(NodeCordoned(node_id="n0", by="ops", reason="broken fan"))
    driver.join(node("n2"))
    assert node_of(driver, "training") == "n2"
    assert not driver.state.planned
    stopped(driver, "lent")


def test_cells_of_every_kind() -> None:
    """No GPUs at all; fewer cores than GPUs, where all are reserved and CPU jobs only borrow; nothing
    reserved: no job is lost, nothing breaks."""
    driver = cell(node("n0", gpus=0, cores=4))
    run(driver, "a", 0, 4)
    assert not driver.job("a").array.borrows
    driver = cell(node("n0", gpus=8, cores=4))
    assert run(driver, "a", 0, 4).array.borrows
    driver = cell(node("n0"), cores_per_gpu=0.0)
    assert not run(driver, "a", 0, 28).array.borrows
    submit(driver, "training", 1, 1)
    assert driver.job("training").status is JobStatus.QUEUED  # all cores are the CPU array's


JOBS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 1, 2, 4, 5]), st.integers(1, 16), st.sampled_from(["ada", "bob", "eve"])
    ),
    min_size=4,
    max_size=30,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs=JOBS, order=st.randoms(use_true_random=False), nodes=st.integers(1, 3))
def test_all_jobs_end_whatever_comes(jobs: list[tuple[int, int, str]], order: object, nodes: int) -> None:
    """Jobs come, and end in any order; the driver checks the state after every step. All start, no job gives
    back cores more often than allowed, and cores that jobs without GPUs hold beyond the CPU array are always
    held by borrowers."""
    driver = cell(*(node(f"n{i}") for i in range(nodes)), patience_ms=MINUTE_MS)
    coming = [
        partial(submit, driver, f"j{i}", gpus, max(cores, gpus), owner)
        for i, (gpus, cores, owner) in enumerate(jobs)
    ]
    for minutes in until_all_have_ended(driver, coming, order):
        for job in driver.state.jobs.values():
            assert job.array.reclaims <= 3
        assert minutes < 50 * len(jobs)
