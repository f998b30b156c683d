"""Policies that choose anew who runs: queues, preemption, and room made by moving small jobs."""

import msgspec
import pytest

from penstock.cluster.view import ClusterView
from penstock.ledger.derived.succession import awaited
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.demand import Demand
from penstock.model.inputs.external_events import JobProgress, NodeChanged, NodeLeft, WorkProgressed
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.make_room.clearing import clear_for
from penstock.scheduling.remaining_time import attained_s, remaining_s
from penstock_papers.baselines.preempting.free_gpus import GpuKinds
from penstock_papers.baselines.preempting.ordered import shortest_remaining_service
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


def cell(profile: str, nodes: int = 2, gpus: int = 4, **settings: object) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile, **settings))  # type: ignore[arg-type]
    driver.join(*(node_spec(f"n{i}", gpus) for i in range(nodes)))
    return driver


def submit(driver: CellDriver, job_id: str, gpus: int, run_s: float | None = None) -> None:
    need = estimate(gpus)
    if run_s is not None:
        need = msgspec.structs.replace(need, run_ms=round(run_s * 1_000))
    driver.submit(job_id, None, need)
    settle(driver)


MAX_ROUNDS = 100


def settle(driver: CellDriver) -> None:
    """Lets the plans of this moment be made; nodes start and stop at once. Fails where that finds no end."""
    for _ in range(MAX_ROUNDS):
        steps = driver.at(driver.now_ms - 1_000_000)
        moved = bool(steps)
        for job in list(driver.state.jobs.values()):
            if awaited(driver.state, job):
                continue
            if job.status is JobStatus.LAUNCHING:
                driver.start(job.job_id)
                moved = True
            elif job.status is JobStatus.STOPPING:
                for task_id in list(job.tasks):
                    driver.exit(task_id, None, cause="stopped", signal=15)
                moved = True
        if not moved:
            return
    pytest.fail("plan after plan stops and starts jobs")


def running(driver: CellDriver) -> set[str]:
    return {job.job_id for job in driver.state.jobs.values() if job.status is JobStatus.RUNNING}


def test_the_shorter_job_takes_the_gpus() -> None:
    """A night-long run holds the cell when somebody comes with a minute's test: the test runs first."""
    driver = cell("srtf", nodes=1)
    submit(driver, "long", 4, 36_000)
    submit(driver, "short", 4, 60)
    assert running(driver) == {"short"}
    assert driver.job("long").retries.infrastructure == 1, "a preemption is not the user's failed attempt"
    driver.at(60_000)
    driver.exit("short.1.w0")
    settle(driver)
    assert running(driver) == {"long"}
    assert driver.job("long").attempt == 2


def test_gpus_count_in_srsf_and_not_in_srtf() -> None:
    """Ten minutes on four GPUs against fifteen on one: less time, but more service."""
    for profile, first in (("srtf", "wide"), ("srsf", "narrow")):
        driver = cell(profile, nodes=1)
        submit(driver, "wide", 4, 600)
        submit(driver, "narrow", 1, 900)
        assert running(driver) == {first}, profile


def test_sjf_lets_running_jobs_run() -> None:
    """Shortest job first without preemption: who runs stays, the shortest of the waiting comes next."""
    driver = cell("sjf", nodes=1)
    submit(driver, "long", 4, 36_000)
    submit(driver, "middle", 4, 600)
    submit(driver, "short", 4, 60)
    assert running(driver) == {"long"}
    driver.exit("long.1.w0")
    settle(driver)
    assert running(driver) == {"short"}


def test_what_jobs_tell_counts_more_than_estimates() -> None:
    """The long run turns out to be nearly done: its own word keeps the shorter newcomer waiting."""
    driver = cell("srtf", nodes=1)
    submit(driver, "long", 4, 36_000)
    progress = JobProgress(job_id="long", attained_s=35_990.0, remaining_s=10.0)
    driver.feed(WorkProgressed(node_id="n0", jobs=(progress,)))
    submit(driver, "short", 4, 60)
    assert running(driver) == {"long"}
    driver.at(4_000)
    submit(driver, "shorter", 4, 50)  # the ledger's time is that of its last record
    job = driver.job("long")
    assert attained_s(driver.state, job) == pytest.approx(35_994)
    assert remaining_s(driver.state, job) == pytest.approx(6)


def test_small_jobs_move_to_make_room_for_a_gang() -> None:
    """Two nodes, each with a one-GPU job; a four-GPU job has the right to run: one of the small ones
    moves."""
    driver = cell("srtf")
    for name in ("a", "b", "c", "d"):
        submit(driver, name, 2, 100)
    for name in ("a", "c"):  # one half of each node becomes free
        driver.exit(f"{name}.1.w0")
    settle(driver)
    submit(driver, "wide", 4, 200)
    assert running(driver) == {"b", "d", "wide"}
    assert {driver.job(name).attempt for name in ("b", "d")} == {1, 2}, "one moved, the other stayed"


def test_room_is_not_made_in_vain() -> None:
    """Cores, not GPUs, are what lacks: moving jobs would not help, so nobody is stopped."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4, cores=4), node_spec("n1", 4, cores=4))
    driver.submit("a", None, msgspec.structs.replace(estimate(1, cores=4), run_ms=1_000))
    driver.submit("b", None, msgspec.structs.replace(estimate(1, cores=4), run_ms=1_000))
    driver.submit("c", None, msgspec.structs.replace(estimate(1, cores=4), run_ms=2_000))
    settle(driver)
    assert running(driver) == {"a", "b"}
    assert driver.job("a").attempt == driver.job("b").attempt == 1


def test_tiresias_demotes_by_service_and_keeps_its_order_over_a_takeover() -> None:
    """A job of unknown length loses its priority after an hour of service; a new placer goes on the same."""
    driver = cell("tiresias", nodes=1, profile_settings='{"queue_limits_gpu_s": [400]}')
    submit(driver, "old", 4)
    assert driver.job("old").rank is not None
    assert driver.job("old").rank[:2] == (0, 0)
    driver.at(99_000)
    submit(driver, "young", 4)
    assert running(driver) == {"old"}, "both are in the first queue, and who runs goes first"
    driver.at(100_000)  # 4 GPUs x 100 s: the policy woke by itself
    settle(driver)
    assert running(driver) == {"young"}
    assert driver.job("old").rank[:2] == (1, 1)
    assert dump(load(dump(driver.state))) == dump(driver.state)
    submit(driver, "younger", 4)
    assert running(driver) == {"young"}
    driver.exit("young.1.w0")
    settle(driver)
    assert running(driver) == {"younger"}, "the second queue waits for the first"


def test_a_job_that_ends_while_its_stop_is_on_the_way_has_ended() -> None:
    """The last epoch is over in the very second in which the job is preempted: it must not run all over
    again."""
    for cause, code, outcome in (("exited", 0, "succeeded"), ("stopped", 0, None), ("exited", 1, None)):
        driver = cell("srtf", nodes=1)
        submit(driver, "long", 4, 36_000)
        driver.submit("short", None, msgspec.structs.replace(estimate(4), run_ms=60_000))
        driver.at(0)
        assert driver.job("long").status is JobStatus.STOPPING
        driver.exit("long.1.w0", code, cause=cause)
        assert driver.state.ended.get("long") == outcome, (cause, code)
        settle(driver)
        assert running(driver) == {"short"}


def test_one_plan_for_all_inputs_of_a_moment() -> None:
    """A hundred submissions in one batch lead to one plan, not to a hundred that undo each other."""
    driver = cell("srtf", nodes=1)
    steps = [
        driver.submit(f"j{i}", None, msgspec.structs.replace(estimate(4), run_ms=1_000 - i)) for i in range(5)
    ]
    assert [kinds(step) for step in steps[1:]] == [["job.estimated"]] * 4
    [plan] = driver.at(0)
    assert kinds(plan) == ["timer.fired", "placement.decided", "timer.set"]
    assert plan.facts[1].job_id == "j4"  # type: ignore[attr-defined]


def test_a_trial_changes_nothing() -> None:
    """What would be free if a job had gone is judged on copies: the cell is as before, and what was tried can
    be undone."""
    driver = cell("srtf", nodes=2)
    submit(driver, "runs", 3, 60)
    submit(driver, "waits", 4, 600)
    state = driver.state
    before, runs = dump(state), driver.job("runs")
    pair = Demand(2, estimate(4).worker)
    view = ClusterView(state, (driver.job("waits"),))
    assert view.fit(pair) is None
    assert clear_for(view, pair) == [runs]
    assert view.fit(pair) == (0, 1)
    view = ClusterView(state, (driver.job("waits"),))
    undo = view.release(runs)
    view.claim(pair, (0, 1))
    assert (view.free(0).gpus, view.free(1).gpus) == (0, 0)
    assert view.fit(Demand(1, estimate(1).worker)) is None
    undo()
    assert view.free(0).gpus == -3, "the claim stands, though it no longer fits"
    assert dump(state) == before


def test_a_gang_that_the_cell_became_too_small_for_ends_instead_of_waiting_for_ever() -> None:
    """Half of the cell is given back to the cloud while a job that spans it waits behind a shorter one.

    Under a policy that plans anew nobody is the head of the queue, so nobody is tried and found to be
    hopeless.
    """
    driver = cell("srtf", nodes=2)
    submit(driver, "short", 4, 60)
    driver.submit("wide", job_spec(workers=2), estimate(4))
    settle(driver)
    assert driver.job("wide").status is JobStatus.QUEUED
    driver.feed(NodeLeft(node_id="n1", boot_id="b1", proof="shutdown"))
    settle(driver)
    assert driver.job("wide").unschedulable
    driver.at(driver.state.settings.unschedulable_grace_ms + 1)
    assert driver.state.ended["wide"] == "unschedulable"
    assert "short" in driver.state.jobs


def test_a_preempted_gang_is_judged_when_it_queues_again() -> None:
    """A board loses GPUs for good under a gang that spans the cell. It runs on until a shorter job takes its
    place; then the cell has no place for it any more."""
    driver = cell("srtf", nodes=2)
    driver.submit("wide", job_spec(workers=2), msgspec.structs.replace(estimate(4), run_ms=36_000_000))
    settle(driver)
    driver.feed(NodeChanged(node=node_spec("n1", 2)))
    settle(driver)
    assert driver.job("wide").status is JobStatus.RUNNING
    submit(driver, "short", 4, 60)
    assert running(driver) == {"short"}
    assert driver.job("wide").status is JobStatus.QUEUED
    assert driver.job("wide").unschedulable


def test_a_job_without_gpus_has_a_place_in_the_order_however_long_it_takes() -> None:
    """A data loader of unknown length: infinite time on no GPU is no GPU time, not a number that equals
    nothing."""
    driver = cell("srsf")
    submit(driver, "loader", 0)
    assert running(driver) == {"loader"}
    assert shortest_remaining_service(driver.state, driver.job("loader")) == 0.0


def test_a_placer_that_read_a_snapshot_counts_gpus_in_the_same_order() -> None:
    """A machine is upgraded and downgraded again. The index of who saw it lists the kinds of GPUs in another
    order than one made anew: under srsf a replay stopped other jobs than the record."""
    driver = CellDriver(PlacerSettings(profile="srsf"))
    driver.join(node_spec("n0", 2), node_spec("n1", 2, model="A100"))
    for gpus in (4, 2):
        driver.feed(NodeChanged(node=node_spec("n0", gpus)))
    restored = load(dump(driver.state))
    assert list(driver.state.index.shape) != list(restored.index.shape)
    assert GpuKinds(driver.state).nodes == GpuKinds(restored).nodes == [0b01, 0b10]
