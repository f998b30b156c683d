"""The default profile, `penstock`: gangs stay together, and who waits holds up nobody who is not in its way.

The seven cases that users met before it was the default, and where each is told:
1. A gang of four is split though a whole node is free: `test_a_gang_of_four_goes_to_the_free_node`.
2. A head that waits for hardware out of use blocks idle GPUs:
   `test_a_head_that_waits_for_a_faulted_gpu_holds_up_nobody`.
3. What the estimator learns of a running job reaches no decision:
   `test_what_is_learned_of_a_running_job_lets_another_start`.
4. A V100 job is stopped for one that needs an A100: `test_preemption.py`,
   `test_nobody_is_stopped_for_gpus_of_another_model`.
5. A job is stopped for cores that no node has: `test_preemption.py`,
   `test_nobody_is_stopped_for_cores_that_no_stop_brings`.
6. Preemption destroys work: `tests/e2e/scheduling/test_checkpoints.py`, `test_a_preempted_job_loses_nothing`.
7. Others take the target of a job that moves: `tests/unit/scheduling/acting/test_moves.py`,
   `test_nobody_else_gets_the_target`. This profile stops nobody (`test_it_stops_nobody`), so 4 to 6 are told
   of profiles that do.
"""

import msgspec
import pytest

from penstock.cluster.reasons import Reason
from penstock.model.inputs.external_events import GpuFaulted, NodeCordoned, NodeLeft, NodeUncordoned
from penstock.model.nouns.settings import OWN_PROFILE, PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.order.fair import FairResponse
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, job_spec, node_spec
from tests.unit.ledger.state.test_remaining import answer
from tests.unit.scheduling.make_room.test_preemption import needing


def cell(**settings: object) -> CellDriver:
    return CellDriver(PlacerSettings(profile=OWN_PROFILE, **settings))


def status(driver: CellDriver, job_id: str) -> JobStatus:
    return driver.job(job_id).status


def nodes_of(driver: CellDriver, job_id: str) -> list[str]:
    return [task.place.node_id for task in driver.job(job_id).tasks.values()]


def start(driver: CellDriver, job_id: str, spec: object = None, **need: int) -> None:
    driver.submit(job_id, spec, needing(need.pop("gpus", 1), need.pop("run_s", 600), **need))
    driver.start(job_id)


def test_a_gang_of_four_goes_to_the_free_node() -> None:
    """Two nodes have two free GPUs each, a third one is empty: the ring of four stays on one node."""
    driver = cell()
    driver.join(*(node_spec(f"n{n}", 4) for n in range(3)))
    for number in range(2):
        start(driver, f"half{number}", gpus=2)
        driver.feed(
            NodeCordoned(node_id=f"n{number}", by="ada", reason="so that the next one goes elsewhere")
        )
    for number in range(2):
        driver.feed(NodeUncordoned(node_id=f"n{number}", by="ada", reason="done"))
    assert sorted(nodes_of(driver, "half0") + nodes_of(driver, "half1")) == ["n0", "n1"]
    start(driver, "ring", job_spec(workers=4), gpus=1)
    assert nodes_of(driver, "ring") == ["n2"] * 4


def test_a_gang_that_no_node_holds_stays_in_one_rack() -> None:
    """Eight GPUs are wanted. The first rack has four free, the second one eight on two nodes."""
    driver = cell()
    driver.join(node_spec("a0", 4, rack="a"), node_spec("b0", 4, rack="b"), node_spec("b1", 4, rack="b"))
    start(driver, "pair", job_spec(workers=2), gpus=4)
    assert sorted(nodes_of(driver, "pair")) == ["b0", "b1"]


def test_a_head_that_waits_for_a_faulted_gpu_holds_up_nobody() -> None:
    """145 jobs waited for thirty days beside 32 free V100: the head of the queue asked for eight GPUs of the
    node with the broken one."""
    driver = cell(backfill_window=4)
    driver.join(node_spec("broken", 8, model="A100"), node_spec("v0", 8, model="V100"))
    driver.feed(GpuFaulted(node_id="broken", gpu=7, fault="xid", code=79))
    driver.submit("eight", job_spec(models=("A100",)), needing(8, 600))
    assert status(driver, "eight") is JobStatus.QUEUED
    for number in range(300):
        start(driver, f"v{number}", job_spec(models=("V100",)), gpus=1, run_s=60)
        driver.exit(f"v{number}.1.w0")
    assert status(driver, "eight") is JobStatus.QUEUED


def test_who_is_next_and_can_never_run_holds_up_nobody() -> None:
    """The other half of the cell is fenced for good. The urgent job that wanted all of it comes first in its
    tenant's order, behind a small one in the queue, and with it the bound on how many are passed is used
    up."""
    driver = cell(backfill_window=1)
    driver.join(node_spec("n0", 4), node_spec("n1", 4))
    start(driver, "all", job_spec(workers=2, attempts=1), gpus=4)
    driver.submit("small", None, needing(1, 600))
    driver.submit("urgent", job_spec(workers=2, priority=5), needing(4, 600))
    driver.feed(NodeLeft(node_id="n1", boot_id="b1", proof="fenced"))
    driver.exit("all.1.w0", None, cause="stopped", signal=15)
    driver.at(0)
    assert str(driver.job("urgent").unschedulable).startswith("never_fits")
    assert status(driver, "small") is JobStatus.LAUNCHING


LONG_WAIT_S = 140_000
"""Enough for nodes to be kept for a job of 4,800 GPU seconds, even one that wants all of the cell."""


def test_a_job_that_ends_in_time_runs_on_nodes_that_are_kept_for_another() -> None:
    """Four GPUs of eight are free, and a job that has waited for a night wants all of them; the others are
    free in ten minutes. A job of five minutes may start, one of an hour may not."""
    driver = cell()
    driver.join(node_spec("n0", 8))
    start(driver, "first", gpus=4, run_s=LONG_WAIT_S + 600)
    driver.submit("eight", None, needing(8, 600))
    driver.at(LONG_WAIT_S * 1_000)
    driver.submit("hour", None, needing(2, 3_600))
    unit = driver.state.planned["eight"]
    assert (unit.nodes, unit.expected_ms) == (("n0",), driver.now_ms + 600_000)
    driver.submit("brief", None, needing(2, 300))
    assert [str(status(driver, name)) for name in ("eight", "hour", "brief")] == [
        "queued",
        "queued",
        "launching",
    ]
    eight, hour = explain(driver.state, "eight"), explain(driver.state, "hour")
    assert (eight.reason, eight.detail) == (Reason.NODES_KEPT, "n0, expected in 10 min")
    assert (hour.reason, hour.detail) == (Reason.KEPT_FOR_OTHERS, "n0, expected in 10 min, for eight")
    driver.start("brief")
    driver.exit("brief.1.w0")
    driver.exit("first.1.w0")
    assert status(driver, "eight") is JobStatus.LAUNCHING
    assert not driver.state.planned


@pytest.mark.parametrize(("left_s", "hour"), [(None, JobStatus.QUEUED), (4 * 3_600, JobStatus.LAUNCHING)])
def test_what_is_learned_of_a_running_job_lets_another_start(left_s: int | None, hour: JobStatus) -> None:
    """The same cell, but the estimator has seen the first job's steps: it takes four hours more and not ten
    minutes. So a job of an hour is in nobody's way."""
    driver = cell()
    driver.join(node_spec("n0", 8))
    start(driver, "first", gpus=4, run_s=LONG_WAIT_S + 600)
    driver.submit("eight", None, needing(8, 600))
    driver.at(LONG_WAIT_S * 1_000)
    if left_s is not None:
        driver.feed(answer(driver, "first", left_s))
    driver.submit("hour", None, needing(2, 3_600))
    assert status(driver, "hour") is hour


def test_it_stops_nobody() -> None:
    """A job of a week has the only A100, and a short one for it comes, of higher priority and of a tenant
    that has nothing."""
    driver = cell()
    driver.join(node_spec("a", 1, model="A100"), node_spec("v", 1, model="V100"))
    start(driver, "week", job_spec(models=("A100",)), run_s=600_000)
    start(driver, "beside", job_spec(models=("V100",)), run_s=600_000)
    driver.submit("short", job_spec(models=("A100",), owner="other", priority=10), needing(1, 60))
    driver.at(3_000_000)
    driver.submit("again", job_spec(owner="third"), needing(1, 60))
    assert {name: str(status(driver, name)) for name in ("week", "beside", "short")} == {
        "week": "running",
        "beside": "running",
        "short": "queued",
    }


def test_who_comes_to_a_full_cell_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four thousand jobs wait, and hundreds more come each second: none of them has to look at the others'
    order."""
    driver = cell()
    driver.join(node_spec("n0", 8))
    start(driver, "all", gpus=8, run_s=600)
    asked: list[bool] = []
    order = FairResponse.order
    monkeypatch.setattr(FairResponse, "order", lambda *given: asked.append(True) or order(*given))
    for number in range(50):
        driver.submit(f"waits{number}", None, needing(1, 60))
    assert not asked
    driver.exit("all.1.w0")
    assert [str(status(driver, f"waits{number}")) for number in range(9)] == ["launching"] * 8 + ["queued"]


def test_who_has_just_come_keeps_nothing() -> None:
    """The same job of eight GPUs, submitted a minute ago: GPUs do not idle for it."""
    driver = cell()
    driver.join(node_spec("n0", 8))
    start(driver, "first", gpus=4, run_s=600)
    driver.submit("eight", None, needing(8, 600))
    driver.submit("hour", None, needing(2, 3_600))
    assert status(driver, "hour") is JobStatus.LAUNCHING
    assert not driver.state.planned


def test_who_is_not_in_the_way_runs_on_a_kept_node() -> None:
    """Four of eight GPUs are kept from the moment on at which the job there ends. Two others are free for
    ever."""
    driver = cell()
    driver.join(node_spec("n0", 8))
    start(driver, "first", gpus=4, run_s=LONG_WAIT_S + 600)
    start(driver, "ends", gpus=2, run_s=LONG_WAIT_S + 300)
    driver.submit("four", None, needing(4, 600))
    driver.at(LONG_WAIT_S * 1_000)
    driver.submit("two", None, needing(2, 36_000))
    assert [*driver.state.planned] == ["four"]
    assert status(driver, "two") is JobStatus.QUEUED, "with it four GPUs would not be free in five minutes"
    driver.exit("first.1.w0")
    assert status(driver, "four") is JobStatus.LAUNCHING
    assert status(driver, "two") is JobStatus.LAUNCHING


def test_a_job_of_unknown_length_is_not_in_the_way_of_who_has_waited_long() -> None:
    """A gang of two nodes waits for one of them. A job of unknown length does not go to the free one that is
    kept."""
    driver = cell()
    driver.join(*(node_spec(f"n{n}", 4) for n in range(3)))
    for number in range(2):
        start(driver, f"busy{number}", gpus=4, run_s=LONG_WAIT_S + (600, 6_000)[number])
    driver.submit("pair", job_spec(workers=2), needing(4, 600))
    driver.at(LONG_WAIT_S * 1_000)
    driver.submit("unknown", None, msgspec.structs.replace(needing(1, 1), run_ms=None))
    assert sorted(driver.state.planned["pair"].nodes) == ["n0", "n2"]
    assert status(driver, "unknown") is JobStatus.QUEUED
    driver.exit("busy1.1.w0")
    assert sorted(nodes_of(driver, "pair")) == ["n1", "n2"], "it starts where it fits first"


def test_a_tenant_over_its_share_comes_later() -> None:
    """One team has sent fifty jobs, another one sends its first: it is next, though forty-eight are before
    it."""
    driver = cell()
    driver.join(node_spec("n0", 2))
    for number in range(6):
        driver.submit(f"many{number}", job_spec(owner="big"), needing(1, 600))
    driver.submit("one", job_spec(owner="small"), needing(1, 600))
    for name in ("many0", "many1"):
        driver.start(name)
    driver.exit("many0.1.w0")
    assert status(driver, "one") is JobStatus.LAUNCHING


@pytest.mark.parametrize(("waited_s", "first"), [(600, "new"), (40_000, "gang")])
def test_a_large_gang_that_has_waited_long_comes_before_its_tenants_turn(waited_s: int, first: str) -> None:
    """A team holds three nodes of four and waits for a node with its next gang; another team sends one after
    the other. Its share alone would let the gang wait for as long as they come."""
    driver = cell()
    for number in range(4):
        driver.join(node_spec(f"n{number}", 8))
    for number in range(3):
        start(driver, f"held{number}", job_spec(owner="big"), gpus=8, run_s=100_000)
    start(driver, "running", job_spec(owner="small"), gpus=8, run_s=50_000)
    driver.submit("gang", job_spec(owner="big"), needing(8, 600))
    driver.at(waited_s * 1_000)
    driver.submit("new", job_spec(owner="small"), needing(8, 600))
    driver.exit("running.1.w0")
    assert status(driver, first) is JobStatus.LAUNCHING


@pytest.mark.parametrize(("waited_s", "first"), [(1_500, "short"), (5_000, "long")])
def test_gangs_of_whole_nodes_wait_less_for_their_length(waited_s: int, first: str) -> None:
    """Eight GPUs for an hour, against a job of one GPU and a minute that has waited for a quarter of an
    hour."""
    driver = cell()
    for number in range(4):
        driver.join(node_spec(f"n{number}", 8))
        start(driver, f"running{number}", gpus=8, run_s=20_000)
    driver.submit("long", None, needing(8, 3_600))
    driver.at((waited_s - 900) * 1_000)
    driver.submit("short", None, needing(1, 60))
    driver.at(waited_s * 1_000)
    driver.exit("running0.1.w0")
    assert status(driver, first) is JobStatus.LAUNCHING


@pytest.mark.parametrize(("priority", "first"), [(0, "sweep"), (5, "final"), (-5, "sweep")])
def test_a_tenants_urgent_job_passes_its_other_jobs(priority: int, first: str) -> None:
    """A student's sweep waits; the run for tomorrow's paper comes last, and is next all the same."""
    driver = cell()
    driver.join(node_spec("n0", 1))
    start(driver, "running", job_spec(owner="ada"))
    driver.submit("sweep", job_spec(owner="ada"), needing(1, 600))
    driver.submit("final", job_spec(owner="ada", priority=priority), needing(1, 600))
    driver.exit("running.1.w0")
    assert status(driver, first) is JobStatus.LAUNCHING


def test_nobody_passes_other_tenants_by_asking_for_the_highest_priority() -> None:
    """One team gives all of its jobs the highest priority. The other team's job has waited longer and is
    next."""
    driver = cell()
    driver.join(node_spec("n0", 1))
    start(driver, "running", job_spec(owner="third"))
    driver.submit("modest", job_spec(owner="b"), needing(1, 600))
    for number in range(4):
        driver.submit(f"greedy{number}", job_spec(owner="a", priority=10), needing(1, 600))
    driver.exit("running.1.w0")
    assert status(driver, "modest") is JobStatus.LAUNCHING


def test_why_names_what_the_place_in_the_order_rests_on() -> None:
    """Ada holds half of the node, as much as her share; she sees her job's priority beside it."""
    driver = cell()
    driver.join(node_spec("n0", 2, cores=4))
    start(driver, "running", job_spec(owner="ada"))
    start(driver, "other", job_spec(owner="bob"))
    driver.submit("urgent", job_spec(owner="ada", priority=5), needing(1, 3_600))
    driver.at(7_200_000)
    driver.feed(NodeUncordoned(node_id="n0", by="ada", reason="any record, two hours later"))
    found = explain(driver.state, "urgent", driver.now_ms)
    assert found.claim == (
        "ada holds 50% of the cell, at or above its share of 50%; priority 5 among its jobs; "
        "waited 2 h, and jobs of this size are raised every 1 h 4 min"
    )
    assert explain(driver.state, "running").claim == ""


def test_jobs_of_lower_priority_use_what_the_higher_ones_cannot() -> None:
    """The urgent job needs the whole node and does not fit; the tenant's small ones go on, each of them once
    a place is free."""
    driver = cell()
    driver.join(node_spec("n0", 2))
    start(driver, "running", gpus=1)
    driver.submit("urgent", job_spec(priority=10), needing(2, 600))
    driver.submit("low", job_spec(priority=-3), needing(1, 60))
    assert status(driver, "low") is JobStatus.LAUNCHING
    driver.submit("middle", job_spec(priority=3), needing(1, 600))
    driver.start("low")
    driver.submit("usual", None, needing(1, 60))
    driver.exit("low.1.w0")
    assert status(driver, "middle") is JobStatus.LAUNCHING
    assert status(driver, "usual") is JobStatus.QUEUED


@pytest.mark.parametrize(("waited_s", "first"), [(0, "short"), (7_200, "long")])
def test_short_jobs_pass_long_ones_until_those_have_waited(waited_s: int, first: str) -> None:
    """A job of an hour that has just come lets one of a minute pass; after two hours in the queue it does
    not."""
    driver = cell()
    driver.join(node_spec("n0", 1))
    start(driver, "running", gpus=1, run_s=7_200)
    driver.submit("long", None, needing(1, 3_600))
    driver.at(waited_s * 1_000)
    driver.submit("short", None, needing(1, 60))
    driver.at((waited_s + 30) * 1_000)
    driver.exit("running.1.w0")
    assert status(driver, first) is JobStatus.LAUNCHING
