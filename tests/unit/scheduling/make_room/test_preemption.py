"""Nobody is stopped for a job that could not then start, and claims of stopped room are kept: preemption
tried on a copy."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.reasons import Reason
from penstock.model.inputs.external_events import GpuFaulted, NodeCordoned
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec
from tests.support.own_settings import limited
from tests.unit.scheduling.make_room.test_replan import cell, running, settle, submit


def needing(gpus: int, run_s: float, **need: int) -> msgspec.Struct:
    """An estimate of so many GPUs per worker, seconds, and more of something else."""
    found = estimate(gpus)
    worker = msgspec.structs.replace(found.worker, **need)
    return msgspec.structs.replace(found, worker=worker, run_ms=round(run_s * 1_000))


def waits_and_nobody_was_stopped(driver: CellDriver, waiting: str, *others: str) -> None:
    settle(driver)
    assert running(driver) == set(others)
    assert waiting in driver.state.jobs
    assert [driver.job(name).attempt for name in others] == [1] * len(others), (
        "somebody was stopped for nothing"
    )


def test_nobody_is_stopped_for_gpus_of_another_model() -> None:
    """A short job asks for an A100 in a cell whose only A100 runs something shorter still; the V100 next door
    runs a night-long job, and goes on running it."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("v", 4, model="V100"), node_spec("a", 4, model="A100"))
    driver.submit("night", job_spec(models=("V100",)), needing(4, 36_000))
    driver.submit("brief", job_spec(models=("A100",)), needing(4, 10))
    settle(driver)
    driver.submit("short", job_spec(models=("A100",)), needing(4, 60))
    waits_and_nobody_was_stopped(driver, "short", "night", "brief")


def test_nobody_is_stopped_for_cores_that_no_stop_brings() -> None:
    """A job of one GPU and 48 cores: the node with so many has lent them to shorter jobs, the other never had
    them."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("large", 4, cores=64), node_spec("small", 4, cores=16))
    driver.submit("brief", None, needing(2, 10, cores=32))
    driver.submit("night", None, needing(4, 36_000, cores=8))
    settle(driver)
    driver.submit("short", None, needing(1, 60, cores=48))
    waits_and_nobody_was_stopped(driver, "short", "brief", "night")


def test_a_long_job_gives_up_the_cores_that_a_short_one_lacks() -> None:
    """GPUs are free, cores are not: the job that still needs hours gives them up."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4, cores=16))
    driver.submit("night", None, needing(1, 36_000, cores=12))
    settle(driver)
    driver.submit("short", None, needing(1, 60, cores=12))
    settle(driver)
    assert running(driver) == {"short"}


@pytest.mark.parametrize("profile", ["srtf", "srsf", "tiresias"])
@pytest.mark.parametrize("preemptible", [False, True])
def test_a_job_that_may_not_be_stopped_runs_on(profile: str, preemptible: bool) -> None:
    """A night-long job that cannot save holds all GPUs; a short one comes, and waits. With leave to stop it,
    it would be stopped."""
    driver = CellDriver(limited(profile, 10.0))
    driver.join(node_spec("n0", 4))
    driver.submit("night", job_spec(preemptible=preemptible), needing(4, 36_000))
    settle(driver)
    driver.at(60_000)
    settle(driver)
    driver.submit("short", None, needing(1, 60))
    settle(driver)
    assert running(driver) == ({"short"} if preemptible else {"night"})
    if not preemptible:
        driver.exit("night.1.w0")
        settle(driver)
        assert running(driver) == {"short"}, "its GPUs are free when it has ended"


@pytest.mark.parametrize("preemptible", [False, True])
def test_a_job_that_may_not_be_stopped_does_not_give_up_cores(preemptible: bool) -> None:
    """GPUs are free, cores are not."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4, cores=16))
    driver.submit("night", job_spec(preemptible=preemptible), needing(1, 36_000, cores=12))
    settle(driver)
    driver.submit("short", None, needing(1, 60, cores=12))
    settle(driver)
    assert running(driver) == ({"short"} if preemptible else {"night"})


@pytest.mark.parametrize("preemptible", [False, True])
def test_a_job_that_may_not_be_stopped_does_not_move_for_a_gang(preemptible: bool) -> None:
    """Two small jobs stand on two nodes, and a worker needs a whole one: enough GPUs are free, but spread."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4), node_spec("n1", 4))
    for name in ("a", "b", "c"):
        driver.submit(name, job_spec(preemptible=preemptible), needing(2, 5_000))
    settle(driver)
    driver.exit("a.1.w0")
    settle(driver)
    assert len({driver.job(name).tasks[f"{name}.1.w0"].place.node_id for name in ("b", "c")}) == 2
    driver.submit("wide", None, needing(4, 36_000))
    settle(driver)
    assert ("wide" in running(driver)) == preemptible


@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_nobody_is_stopped_for_a_node_out_of_use(profile: str) -> None:
    """The only node with eight GPUs is cordoned; a job that needs all eight waits for it and stops nobody on
    the small ones."""
    driver = CellDriver(limited(profile, 10.0))
    driver.join(node_spec("wide", 8), node_spec("n0", 4), node_spec("n1", 4))
    driver.feed(NodeCordoned(node_id="wide", by="ada", reason="repair"))
    for name in ("a", "b"):
        driver.submit(name, None, needing(4, 36_000))
    settle(driver)
    driver.at(60_000)
    settle(driver)
    driver.submit("eight", None, needing(8, 60))
    waits_and_nobody_was_stopped(driver, "eight", "a", "b")


def test_nobody_is_stopped_for_a_faulted_gpu() -> None:
    """Of eight GPUs one is broken. A job of eight waits for the repair, not for the end of the job on the
    other seven."""
    driver = cell("srtf", nodes=1, gpus=8)
    driver.feed(GpuFaulted(node_id="n0", gpu=7, fault="xid", code=79))
    submit(driver, "night", 7, 36_000)
    driver.submit("eight", None, needing(8, 60))
    waits_and_nobody_was_stopped(driver, "eight", "night")


def test_who_fits_beside_starts_while_a_stop_is_on_its_way() -> None:
    """A job is owed one node and starts when its stop is proven; the other node becomes free, and a small job
    starts there at once."""
    driver = cell("srtf", nodes=2)
    submit(driver, "night", 4, 36_000)
    driver.submit("wide", None, needing(4, 600))
    settle(driver)
    assert running(driver) == {"night", "wide"}
    driver.submit("urgent", None, needing(4, 60))
    [plan] = driver.at(driver.now_ms - 1_000_000)
    assert kinds(plan).count("stop.decided") == 1
    driver.exit("wide.1.w0")
    driver.submit("small", None, needing(1, 700))
    steps = driver.at(driver.now_ms - 1_000_000)
    placed = [
        fact.job_id for step in steps for fact in step.facts if fact.TYPE == "penstock.placement.decided"
    ]
    assert placed == ["small"]
    assert str(driver.job("urgent").status) == "launching", "its order is at the node"


def test_what_a_stop_will_free_is_not_given_to_others() -> None:
    """The night job is being stopped for eight GPUs over two nodes. A job of one GPU, longer than both, comes
    meanwhile."""
    driver = cell("srtf", nodes=2)
    submit(driver, "night", 4, 36_000)
    driver.submit("pair", job_spec(workers=2), needing(4, 600))
    driver.at(driver.now_ms - 1_000_000)
    assert driver.job("night").stop.reason == "preempted"
    why = explain(driver.state, "pair", driver.state.now_ms)
    assert (why.reason, why.detail) == (Reason.AWAITING_STOPS, "night on n0")
    driver.submit("later", None, needing(1, 40_000))
    driver.at(driver.now_ms - 1_000_000)
    assert str(driver.job("later").status) == "queued", "the free node belongs to the pair"
    settle(driver)
    assert running(driver) == {"pair"}


JOBS = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 2, 3, 4, 8]),
        st.integers(1, 2),
        st.sampled_from([10, 60, 60, 600, 3_600]),
        st.sampled_from([1, 4, 12]),
        st.sampled_from([(), ("V100",), ("A100",)]),
    ),
    min_size=2,
    max_size=14,
)


@given(
    jobs=JOBS,
    profile=st.sampled_from(["srtf", "srsf", "tiresias", "tiresias-fifo"]),
    waits=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_plans_settle(
    jobs: list[tuple[int, int, int, int, tuple[str, ...]]], profile: str, waits: int
) -> None:
    """Whatever comes, the stops of one moment end: nobody is stopped twice for the same claim, and who has
    room starts."""
    driver = CellDriver(limited(profile, 100.0))
    driver.join(
        node_spec("v0", 4, cores=16, model="V100"),
        node_spec("v1", 8, cores=16, model="V100"),
        node_spec("a0", 4, cores=8, model="A100"),
        node_spec("a1", 2, cores=64, model="A100"),
    )
    for number, (gpus, workers, run_s, cores, models) in enumerate(jobs):
        spec: JobSpec = job_spec(workers=workers, models=models)
        before = {job.job_id: job.attempt for job in driver.state.jobs.values()}
        driver.submit(f"j{number}", spec, needing(gpus, run_s, cores=cores))
        settle(driver)
        driver.at(driver.now_ms - 1_000_000 + 1_000 * waits)
        settle(driver)
        stopped = [
            name
            for name, attempt in before.items()
            if name in driver.state.jobs and driver.job(name).attempt > attempt + 2
        ]
        assert not stopped, f"{stopped} were started again and again"


def test_a_gang_starts_where_it_was_tried_if_the_place_stage_finds_no_place() -> None:
    """The place stage puts the parameter server on the node with most free GPUs, whose last core it takes:
    then the workers do not fit. Tried in order of nodes all of them fit."""
    driver = CellDriver(PlacerSettings(profile="tiresias-fifo"))
    driver.join(node_spec("small", 2, cores=8), node_spec("large", 4, cores=2))
    need = needing(2, 600, cores=1)
    server = msgspec.structs.replace(need.worker, gpus=0, gpu_memory_mib=0)
    driver.submit("gang", job_spec(workers=3, ps=1), msgspec.structs.replace(need, parameter_server=server))
    settle(driver)
    assert running(driver) == {"gang"}
