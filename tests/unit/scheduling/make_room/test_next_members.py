"""Next members of leases: who makes others stop has its order at the node before they have stopped, and its
node lets it wait."""

from penstock.cli.queries.explain import in_short
from penstock.cluster.reasons import Reason
from penstock.ledger.check.check import check
from penstock.ledger.derived.succession import awaited
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.inputs.external_events import JobCancelRequested, TaskStarted
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.model.wire.codec import as_written
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, job_spec, node_spec
from tests.unit.scheduling.make_room.test_preemption import needing
from tests.unit.scheduling.make_room.test_replan import running, settle

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
    """The night job has all GPUs when a short one comes: one record stops the one and orders the other, which
    has two of its GPUs and cores of it. The others are free once the night job has ended, and not before."""
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
    assert awaited(driver.state, driver.job("short")) == ()
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
    """A job of four GPUs takes the place of two. The first to end leaves nothing to others; a gap of cores
    would let it start too early."""
    driver = cell(node_spec("n0", 4, cores=4))
    driver.submit("a", None, needing(2, 36_000, cores=2))
    driver.submit("b", None, needing(2, 36_000, cores=2))
    settle(driver)
    driver.submit("short", None, needing(4, 60, cores=4))
    [placed] = planned(driver)
    assert placed.after == ("a", "b")
    stop(driver, "a.1.w0")
    assert awaited(driver.state, driver.job("short")) == ("b",)
    assert (driver.state.nodes["n0"].free_gpu_mask, driver.state.nodes["n0"].free_core_mask) == (0, 0)
    stop(driver, "b.1.w0")
    settle(driver)
    assert running(driver) == {"short"}


def test_it_waits_for_memory_as_before() -> None:
    """The node has no memory for both: nodes are kept for the short job, and it is placed when the stop is
    proven."""
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
    """The night job is ordered and has not answered when it has to make way: whether it ever holds its GPUs
    is not known."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", None, needing(4, 36_000))
    driver.at(0)
    driver.submit("short", None, needing(4, 60))
    assert planned(driver) == []
    settle(driver)
    assert running(driver) == {"short"}


def test_a_gang_waits_in_its_rendezvous_for_a_minute_at_most() -> None:
    """One worker's GPUs are free, the other's are of a job that may save for ten minutes: both start together
    afterwards."""
    for grace_ms, ordered in ((600_000, 0), (30_000, 1)):
        driver = cell(node_spec("n0", 4), node_spec("n1", 4))
        driver.submit("night", job_spec(grace_ms=grace_ms), needing(4, 36_000))
        settle(driver)
        driver.submit("pair", job_spec(workers=2), needing(4, 60))
        assert len(planned(driver)) == ordered


def test_its_node_may_answer_as_late_as_the_other_may_end() -> None:
    """The launch time-out begins when the grace of those before is over: a long save is no silence of the
    node."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", job_spec(grace_ms=600_000), needing(4, 36_000))
    settle(driver)
    driver.submit("short", None, needing(4, 60))
    planned(driver)
    launch_ms = driver.state.settings.launch_timeout_ms
    assert driver.state.timers["short:launch_timeout"].at_ms == driver.state.now_ms + 600_000 + launch_ms


def test_who_was_followed_may_follow_in_turn() -> None:
    """A pair comes after the night job and is cancelled while it waits; its second worker, which has begun,
    is slow to end. By then the night job has ended and is next where that worker was: each is the other's
    predecessor only as of the attempt that it was."""
    driver = cell(node_spec("n0", 4), node_spec("n1", 4))
    driver.submit("night", None, needing(4, 36_000))
    settle(driver)
    driver.submit("pair", job_spec(workers=2), needing(4, 60))
    [placed] = planned(driver)
    assert placed.after == ("night",)
    pair = driver.job("pair").tasks["pair.1.w1"].place
    begun = TaskStarted(
        node_id=pair.node_id,
        task_id=pair.task_id,
        token=driver.job("pair").token,
        pid=7,
        started_ms=driver.now_ms,
    )
    driver.feed(begun)
    driver.feed(JobCancelRequested(job_id="pair"))
    stop(driver, "pair.1.w0")
    driver.submit("tiny", None, needing(4, 6))
    [placed] = planned(driver)
    assert (placed.job_id, placed.after) == ("tiny", ("night",))
    stop(driver, "night.1.w0")
    [placed] = planned(driver)
    assert (placed.job_id, placed.after) == ("night", ("pair",))
    assert check(driver.state) == []
    stop(driver, "pair.1.w1")
    assert driver.state.nodes["n1"].free_gpu_mask == 0
    settle(driver)
    assert running(driver) == {"night", "tiny"}


# --------------------------------------------------------------------------------- units of proposed plans


def proposed(driver: CellDriver, *units: tuple[tuple[str, tuple[str, ...]], ...]) -> list[PlacementDecided]:
    """A batcher plans units of (job, nodes); what is placed for them."""
    named = tuple(
        ProposedUnit(
            jobs=tuple(ProposedJob(job_id=job_id, nodes=nodes) for job_id, nodes in unit), explanation="fits"
        )
        for unit in units
    )
    name = f"p{driver.head.seq}"
    step = driver.feed(PlanProposed(proposal_id=name, proposer="batcher", units=named))
    return [fact for fact in step.facts if isinstance(fact, PlacementDecided)]


def cancelled(*specs: NodeSpec, grace_ms: int = 30_000, profile: str = "fifo") -> CellDriver:
    """A job has all of n0, is running and cancelled."""
    driver = cell(*specs, profile=profile)
    driver.submit("old", job_spec(grace_ms=grace_ms), needing(4, 36_000, cores=8))
    settle(driver)
    driver.feed(JobCancelRequested(job_id="old", reason="enough"))
    return driver


def test_a_unit_of_a_plan_is_ordered_beside_a_stop() -> None:
    """A batcher plans two jobs, one by one, for the GPUs of a job that somebody has cancelled: both orders
    are at the node before it has ended."""
    driver = cancelled(node_spec("n0", 4, cores=8))
    for job_id in "ab":
        driver.submit(job_id, None, needing(2, 60, cores=4))
    first, second = proposed(driver, (("b", ("n0",)),), (("a", ("n0",)),))
    assert [(fact.job_id, fact.after) for fact in (first, second)] == [("b", ("old",)), ("a", ("old",))]
    assert [fact.tasks[0].gpus for fact in (first, second)] == [(0, 1), (2, 3)]
    assert first.unit is not None
    assert not driver.state.planned
    assert explain(driver.state, "a", driver.state.now_ms).reason is Reason.AWAITING_STOPS
    stop(driver, "old.1.w0")
    assert driver.state.nodes["n0"].free_gpu_mask == 0
    settle(driver)
    assert running(driver) == {"a", "b"}


def test_jobs_of_one_unit_are_ordered_together() -> None:
    """One of them has free GPUs: its order goes out with that of the other, which waits for the stop."""
    driver = cancelled(node_spec("n0", 4, cores=8), node_spec("n1", 2), profile="fifo-strict")
    driver.submit("head", job_spec(workers=2), needing(4, 60))
    driver.submit("a", None, needing(4, 60, cores=4))
    driver.submit("b", None, needing(2, 60))
    assert not driver.job("b").tasks
    placed = proposed(driver, (("b", ("n1",)), ("a", ("n0",))))
    assert [(fact.job_id, fact.after) for fact in placed] == [("b", ()), ("a", ("old",))]


def test_a_unit_over_several_nodes_waits_for_a_long_save() -> None:
    """The job that was cancelled may save for ten minutes: members of a gang elsewhere would wait in their
    rendezvous for too long."""
    driver = cancelled(node_spec("n0", 4, cores=8), node_spec("n1", 4), grace_ms=600_000)
    driver.submit("head", job_spec(workers=3), needing(4, 60))
    driver.submit("pair", job_spec(workers=2), needing(4, 60))
    assert proposed(driver, (("pair", ("n0", "n1")),)) == []
    assert list(driver.state.planned) == ["pair"]


def test_under_a_profile_that_stops_jobs_a_stop_is_for_who_comes_first_there() -> None:
    """`srtf` stops a job for one that ends sooner; a batcher asks for its GPUs for another one."""
    driver = cell(node_spec("n0", 4))
    driver.submit("night", None, needing(4, 36_000))
    settle(driver)
    driver.submit("short", None, needing(4, 60))
    driver.submit("long", None, needing(4, 3_600))
    driver.at(0)
    assert proposed(driver, (("long", ("n0",)),)) == []
    assert not driver.job("long").succession.after
