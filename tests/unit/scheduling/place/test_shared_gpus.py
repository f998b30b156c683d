"""Shares of a GPU: small jobs side by side on one GPU, booked to the thousandth in the cell and on the
node."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import assign
from penstock.ledger.check.check import check
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.index import Share
from penstock.ledger.state.job.sharing import ALONE, Sharing
from penstock.model.inputs.external_events import GpuFaulted, NodeChanged
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, Isolation
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.proposals.validate import validate
from penstock.scheduling import profiles
from penstock.scheduling.place.liquid import Liquid
from penstock_services.estimator.core.resources.estimate import estimate as estimated
from tests.support.cluster.driver import CellDriver, job_spec, node_spec


def share(milli: int, *, memory_mib: int = 1_000, cores: int = 1) -> Estimate:
    worker = ResourceVector(gpus=1, gpu_share_milli=milli, cores=cores, gpu_memory_mib=memory_mib)
    return Estimate(worker=worker, confidence=1.0, tier="user", source="a test")


def whole(gpus: int = 1) -> Estimate:
    return Estimate(worker=ResourceVector(gpus=gpus), confidence=1.0, tier="user", source="a test")


def gpus_of(cell: CellDriver, *job_ids: str) -> list[tuple[int, ...]]:
    return [task.place.gpus for job_id in job_ids for task in cell.job(job_id).tasks.values()]


def held(cell: CellDriver) -> list[int]:
    """The GPU of every task that has one."""
    return [gpu for job in cell.state.jobs for gpus in gpus_of(cell, job) for gpu in gpus]


@pytest.fixture
def cell() -> CellDriver:
    driver = CellDriver(PlacerSettings(profile="fifo"))
    driver.join(node_spec("n1", 2, memory_mib=4_000))
    return driver


def test_small_jobs_fill_the_fullest_gpu_that_still_holds_them(cell: CellDriver) -> None:
    """Three notebooks and a training job: the notebooks share GPU 0, so that GPU 1 stays whole."""
    for job_id, milli in (("a", 500), ("b", 300), ("c", 200)):
        cell.submit(job_id, need=share(milli))
    cell.submit("train", need=whole())
    assert gpus_of(cell, "a", "b", "c", "train") == [(0,), (0,), (0,), (1,)]
    assert cell.state.nodes["n1"].free().gpus == 0


@pytest.mark.parametrize("profile", ["liquid", "fifo", "best-fit", "fgd", "drf", "hived", "packing"])
def test_where_an_end_cannot_be_proven_a_gpu_has_one_task(profile: str) -> None:
    """A node that can make neither namespace nor cgroup: a small job gets a whole GPU, also of one gang."""
    cell = CellDriver(PlacerSettings(profile=profile))
    spec = node_spec("n1", 3, memory_mib=4_000)
    cell.join(msgspec.structs.replace(spec, isolation=Isolation(exits="none", files=False)))
    cell.submit("a", need=share(300))
    cell.submit("gang", job_spec(workers=2), share(300))
    cell.submit("c", need=share(300))
    assert len(set(held(cell))) == len(held(cell)) >= 2
    for job_id in ("a", "gang", "c"):
        if job_id in cell.state.jobs and cell.job(job_id).tasks:
            cell.start(job_id)
            for task_id in list(cell.job(job_id).tasks):
                cell.exit(task_id)
            assert len(set(held(cell))) == len(held(cell)), "two tasks on one GPU"


def test_a_share_waits_when_no_gpu_has_so_much_left(cell: CellDriver) -> None:
    """Two GPUs are left with 400 and 300: 350 goes to the first of them, the next 350 waits for an exit."""
    cell.submit("a", need=share(600))
    cell.submit("b", need=share(700))
    cell.submit("c", need=share(350))
    cell.submit("d", need=share(350))
    assert gpus_of(cell, "a", "b", "c") == [(0,), (1,), (0,)]
    assert not cell.job("d").tasks
    cell.start("b")
    cell.exit("b.1.w0")
    assert gpus_of(cell, "d") == [(1,)]


def test_memory_is_promised_once(cell: CellDriver) -> None:
    """Time is left on GPU 0, but its memory is promised: the job gets GPU 1."""
    cell.submit("a", need=share(100, memory_mib=3_500))
    cell.submit("b", need=share(100, memory_mib=600))
    assert gpus_of(cell, "a", "b") == [(0,), (1,)]
    assert cell.state.nodes["n1"].shared == {0: Share(900, 500), 1: Share(900, 3_400)}


def test_a_gpu_is_whole_again_when_its_last_share_ends(cell: CellDriver) -> None:
    """A job that needs both GPUs waits for the last of the notebooks."""
    cell.submit("a", need=share(500))
    cell.submit("b", need=share(500))
    cell.submit("both", need=whole(2))
    for job_id in ("a", "b"):
        assert not cell.job("both").tasks
        cell.start(job_id)
        cell.exit(f"{job_id}.1.w0")
    assert gpus_of(cell, "both") == [(0, 1)]
    assert cell.state.nodes["n1"].shared == {}


def test_whoever_shared_a_gpu_did_not_run_alone(cell: CellDriver) -> None:
    """`a` and `b` have halves of GPU 0; `c` and `d` have most of GPU 1, one after the other. The estimator
    learns step times from `c` and `d` alone. A snapshot in the midst of it knows the same."""
    for job_id, milli in (("a", 500), ("b", 500), ("c", 900)):
        cell.submit(job_id, need=share(milli))
        cell.start(job_id)
    came_ms = cell.job("b").placed_ms
    assert cell.job("a").sharing == Sharing(("b",), came_ms or 0, ever=True)
    assert cell.job("b").sharing.jobs == ("a",)
    assert cell.job("c").sharing == ALONE
    cell.exit("b.1.w0")
    assert (cell.job("a").sharing.jobs, cell.job("a").sharing.ever) == ((), True)
    assert cell.job("a").sharing.since_ms == cell.state.now_ms
    cell.exit("c.1.w0")
    cell.submit("d", need=share(900))
    assert gpus_of(cell, "d") == [(1,)]
    assert cell.job("d").sharing == ALONE
    assert load(dump(cell.state)).jobs["a"].sharing == cell.job("a").sharing


def test_the_books_of_who_shares_are_checked(cell: CellDriver) -> None:
    for job_id in ("a", "b"):
        cell.submit(job_id, need=share(500))
    known, cell.job("a").sharing = cell.job("a").sharing, ALONE
    assert any("shares GPUs with" in problem for problem in check(cell.state))
    cell.job("a").sharing = replace(known, ever=False)
    assert any("ran alone" in problem for problem in check(cell.state))
    cell.job("a").sharing = known


def test_workers_of_one_gang_are_no_neighbours(cell: CellDriver) -> None:
    """Four workers of 400 on two GPUs: that is how the job runs, and its step times are its own."""
    cell.submit("four", job_spec(workers=4), share(400))
    assert cell.job("four").sharing == ALONE


def test_a_faulted_gpu_gives_no_more_shares(cell: CellDriver) -> None:
    """GPU 0 reports an Xid while somebody computes on half of it."""
    cell.submit("a", need=share(500))
    cell.feed(GpuFaulted(node_id="n1", gpu=0, fault="xid", code=79, detail="fell off the bus"))
    cell.submit("b", need=share(500))
    assert gpus_of(cell, "b") == [(1,)]


def test_a_node_that_lost_a_gpu_keeps_its_books(cell: CellDriver) -> None:
    """GPU 1 disappears with a share on it; the task's exit must not bring it back."""
    cell.submit("a", need=share(900))
    cell.submit("b", need=share(900))
    assert gpus_of(cell, "a", "b") == [(0,), (1,)]
    cell.feed(NodeChanged(node=node_spec("n1", 1, memory_mib=4_000)))
    cell.start("b")
    cell.exit("b.1.w0")
    assert cell.state.nodes["n1"].free().gpus == 0
    assert cell.state.nodes["n1"].shared == {0: Share(100, 3_000)}


def test_the_smallest_gpu_limits_what_each_has(cell: CellDriver) -> None:
    """The node gets other GPUs, and joins again with the former ones."""
    for memory_mib in (2_000, 4_000, 3_000):
        cell.feed(NodeChanged(node=node_spec("n1", 2, memory_mib=memory_mib)))
        assert cell.state.nodes["n1"].gpu_memory_mib == memory_mib
    cell.join(node_spec("n1", 2, memory_mib=4_000, boot="b2"))
    assert cell.state.nodes["n1"].gpu_memory_mib == 4_000
    assert load(dump(cell.state)).nodes["n1"].gpu_memory_mib == 4_000


def test_shares_of_a_gang_are_all_or_nothing(cell: CellDriver) -> None:
    """Five workers of 400 would need three GPUs: the gang can never run here; four can, two on each GPU."""
    cell.submit("five", job_spec(workers=5), share(400))
    assert "never" in cell.job("five").unschedulable
    cell.submit("four", job_spec(workers=4), share(400))
    assert gpus_of(cell, "four") == [(0,), (0,), (1,), (1,)]


def test_a_snapshot_keeps_shares(cell: CellDriver) -> None:
    """A follower that starts from a snapshot must book like one that folded everything."""
    cell.submit("a", need=share(250))
    loaded = load(dump(cell.state))
    assert loaded.nodes["n1"].shared == {0: Share(750, 3_000)}
    assert dump(loaded) == dump(cell.state)


def test_a_proposed_share_must_be_free(cell: CellDriver) -> None:
    """The batcher planned on an older state: what it names is judged against what is left now."""
    cell.submit("running", need=share(600))
    cell.submit("rest", need=whole())
    cell.submit("late", need=share(500))
    assert not cell.job("late").tasks
    cell.start("rest")
    cell.exit("rest.1.w0")
    assert gpus_of(cell, "late") == [(1,)]
    cell.submit("next", need=share(500))
    assert gpus_of(cell, "next") == [(1,)]
    cell.submit("more", need=share(500))
    unit = ProposedUnit(jobs=(ProposedJob(job_id="more", nodes=("n1",)),), explanation="")
    verdict = validate(cell.state, PlanProposed(proposal_id="p", proposer="batcher", units=(unit,)))
    assert (verdict.reason, verdict.detail) == (
        "infeasible",
        "task 0 of more on n1: no GPU has 500/1000 and 1000 MiB left",
    )


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_share_is_of_one_gpu(gpus: int) -> None:
    """`gpus: 2` with a share asks for two things at once; the error names both fields."""
    with pytest.raises(ValueError, match="gpu_share_milli 500 needs gpus 1"):
        ResourceRequest(gpus=gpus, gpu_share_milli=500)


def test_a_user_who_asks_for_a_share_gets_one_gpu_of_it() -> None:
    """Nothing else is known: the estimator must not answer with two GPUs from history."""
    need = estimated(JobSpec(command=("x",), resources=ResourceRequest(gpu_share_milli=250)), ())
    assert (need.worker.gpus, need.worker.gpu_share_milli) == (1, 250)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([1, 120, 250, 334, 500, 800, 1_000]), st.integers(1, 3)),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([name for name in profiles.names() if name not in ("tiresias-fifo",)]),
)
def test_no_order_of_arrivals_and_exits_overbooks_a_gpu(
    steps: Sequence[tuple[int, int, int]], profile: str
) -> None:
    """Whole and shared jobs, gangs and single ones, come and go under every profile; the driver checks each
    step."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("n1", 2, memory_mib=4_000), node_spec("n2", 3, memory_mib=4_000))
    for number, (ending, milli, workers) in enumerate(steps):
        need = whole() if milli == 1_000 else share(milli)
        cell.submit(f"j{number}", job_spec(workers=workers), need)
        cell.at(number + 1)
        running = [job for job in cell.state.jobs.values() if job.tasks and job.stop.reason is None]
        if running and ending < 6:
            job = running[ending % len(running)]
            cell.start(job.job_id)
            for task_id in list(job.tasks):
                cell.exit(task_id)
            cell.at(number + 1)
    for job in cell.state.jobs.values():
        if job.status == "queued":
            plan = Liquid(0.5).place(cell.state, job, LazyRng(0, ""))
            if plan is not None:
                assign(cell.state, job, plan)


def test_a_node_of_unequal_gpus_gives_as_much_as_its_smallest(cell: CellDriver) -> None:
    """A workstation with an old and a new card: shares are promised as if both were the old one."""
    spec = node_spec("n2", 2, memory_mib=8_000)
    small = Gpu(index=1, uuid="GPU-old", model="V100", memory_mib=2_000)
    cell.join(msgspec.structs.replace(spec, gpus=(spec.gpus[0], small)))
    cell.submit("a", need=share(500, memory_mib=3_000))
    cell.submit("b", need=share(500, memory_mib=3_000))
    assert {task.place.node_id for job in ("a", "b") for task in cell.job(job).tasks.values()} == {"n1"}
