"""Next members of leases: who makes others stop has its order at the node before they have stopped, and its node lets it wait."""

from penstock.cli.explain import in_short
from penstock.ledger.snapshot import dump, load
from penstock.model.codec import as_written
from penstock.model.external_events import JobCancelRequested
from penstock.model.ledger_events import PlacementDecided
from penstock.model.settings import PlacerSettings
from penstock.model.types import NodeSpec
from penstock.policies.explain import explain
from penstock.policies.reasons import Reason
from tests.support.driver import CellDriver, job_spec, node_spec
from tests.unit.policies.test_preemption import needing
from tests.unit.policies.test_replan import running, settle

STARTED = 1_000_000


def cell(*nodes: NodeSpec, profile: str = "srtf") -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(*nodes)
    return driver


def planned(driver: CellDriver) -> list[PlacementDecided]:
    """Placements of the plan that is due now."""
    steps = driver.at(driver.now_ms - STARTED)
    return [fact for step in steps for fact in step.facts if isinstance(fact, PlacementDecided)]


def stop(driver: CellDriver, task_id: str) -> None:
    driver.exit(task_id, None, cause="stopped", signal=15)


def test_its_order_goes_out_with_the_stop() -> None:
    """The night job has all GPUs when a short one comes: one record stops the one and orders the other, which has two of its GPUs and
    cores of it. The others are free once the night job has ended, and not before."""
    driver = cell(node_spec("n0", 4, cores=8))
    driver.submit("night", job_spec(grace_ms=30_000), needing(4, 36_000, cores=8))
    settle(driver)
    driver.submit("short", None, needing(2, 60, cores=4))
    [placed] = planned(driver)
    assert (placed.job_id, placed.after) == ("short", ("night",))
    assert [place.gpus for place in placed.tasks] == [(0, 1)]
    assert [place.cores for place in placed.tasks] == [(0, 1, 2, 3)]
    shown = in_short({"placement": as_written(driver.explanations[-1])}, {})
    assert shown == "chosen by srtf: starts when it has ended there: night"
    why = explain(driver.state, "short", driver.state.now_ms)
    assert (why.reason, why.detail) == (Reason.AWAITING_STOPS, "night on n0")
    assert driver.state.nodes["n0"].free_gpu_mask == 0
    stop(driver, "night.1.w0")
    assert driver.state.nodes["n0"].free_gpu_mask == 0b1100
    assert driver.job("short").after == ()
    driver.start("short")
    assert running(driver) == {"short"}


def test_it_may_give_up_before() -> None:
    """The short job is cancelled while it waits: the GPUs stay with the night job until its own end."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", None, needing(4, 36_000))
    settle(driver)
    driver.submit("short", None, needing(4, 60))
    planned(driver)
    driver.feed(JobCancelRequested(job_id="short", reason="no longer needed"))
    stop(driver, "short.1.w0")
    assert driver.state.nodes["n0"].free_gpu_mask == 0
    stop(driver, "night.1.w0")
    settle(driver)
    assert running(driver) == {"night"}


def test_two_may_come_after_one() -> None:
    """One job of four GPUs makes way for two of two each. They come together, whichever is told first."""
    driver = cell(node_spec("n0", 4, cores=4))
    driver.submit("night", None, needing(4, 36_000, cores=4))
    settle(driver)
    driver.submit("a", None, needing(2, 60, cores=2))
    driver.submit("b", None, needing(2, 60, cores=2))
    placed = planned(driver)
    assert [(fact.job_id, fact.after) for fact in placed] == [("a", ("night",)), ("b", ("night",))]
    assert {gpu for fact in placed for gpu in fact.tasks[0].gpus} == {0, 1, 2, 3}
    assert dump(load(dump(driver.state))) == dump(driver.state)
    stop(driver, "night.1.w0")
    assert driver.state.nodes["n0"].free_core_mask == 0
    settle(driver)
    assert running(driver) == {"a", "b"}


def test_one_may_come_after_two() -> None:
    """A job of four GPUs takes the place of two. The first to end leaves nothing to others; a gap of cores would let it start too early."""
    driver = cell(node_spec("n0", 4, cores=4))
    driver.submit("a", None, needing(2, 36_000, cores=2))
    driver.submit("b", None, needing(2, 36_000, cores=2))
    settle(driver)
    driver.submit("short", None, needing(4, 60, cores=4))
    [placed] = planned(driver)
    assert placed.after == ("a", "b")
    stop(driver, "a.1.w0")
    assert driver.job("short").after == ("b",)
    assert (driver.state.nodes["n0"].free_gpu_mask, driver.state.nodes["n0"].free_core_mask) == (0, 0)
    stop(driver, "b.1.w0")
    settle(driver)
    assert running(driver) == {"short"}


def test_it_waits_for_memory_as_before() -> None:
    """The node has no memory for both: nodes are kept for the short job, and it is placed when the stop is proven."""
    driver = cell(node_spec("n0", 4))
    memory_mib = driver.state.nodes["n0"].spec.host_memory_mib * 2 // 3
    driver.submit("night", None, needing(4, 36_000, host_memory_mib=memory_mib))
    settle(driver)
    driver.submit("short", None, needing(4, 60, host_memory_mib=memory_mib))
    assert planned(driver) == []
    assert list(driver.state.planned) == ["short"]
    settle(driver)
    assert running(driver) == {"short"}


def test_nobody_comes_after_who_has_not_begun() -> None:
    """The night job is ordered and has not answered when it has to make way: whether it ever holds its GPUs is not known."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", None, needing(4, 36_000))
    driver.at(0)
    driver.submit("short", None, needing(4, 60))
    assert planned(driver) == []
    settle(driver)
    assert running(driver) == {"short"}


def test_a_gang_waits_in_its_rendezvous_for_a_minute_at_most() -> None:
    """One worker's GPUs are free, the other's are of a job that may save for ten minutes: both start together afterwards."""
    for grace_ms, ordered in ((600_000, 0), (30_000, 1)):
        driver = cell(node_spec("n0", 4), node_spec("n1", 4))
        driver.submit("night", job_spec(grace_ms=grace_ms), needing(4, 36_000))
        settle(driver)
        driver.submit("pair", job_spec(workers=2), needing(4, 60))
        assert len(planned(driver)) == ordered


def test_its_node_may_answer_as_late_as_the_other_may_end() -> None:
    """The launch time-out begins when the grace of those before is over: a long save is no silence of the node."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", job_spec(grace_ms=600_000), needing(4, 36_000))
    settle(driver)
    driver.submit("short", None, needing(4, 60))
    planned(driver)
    launch_ms = driver.state.settings.launch_timeout_ms
    assert driver.state.timers["short:launch_timeout"].at_ms == driver.state.now_ms + 600_000 + launch_ms
