"""The engine: virtual time, the real cores, and a ledger that is the same each time."""

import json
from collections.abc import Sequence

import pytest

from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.simulator.engine import Options
from penstock.simulator.job_models.model import Allocation, End, JobModel, Neighbour, Placement
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import BUSY, ends, job, simulation

PROFILES = ("fifo", "liquid", "random", "even", "k8s-default", "sjf", "srtf", "srsf", "tiresias")


def test_first_come_first_served_to_the_second() -> None:
    """Four GPUs, three jobs: the third has to wait for the first to end."""
    found = simulation([job("a", 0, 100, 2), job("b", 10, 100, 2), job("c", 20, 30, 1)])
    assert ends(found) == {"a": 100, "b": 110, "c": 130}
    figures = found.figures(1, 1)
    assert figures.avg_jct_s == pytest.approx((100 + 100 + 110) / 3)
    assert figures.avg_queue_s == pytest.approx(80 / 3)
    assert figures.makespan_s == 130
    assert figures.gpu_allocation == pytest.approx((200 + 200 + 30) / (4 * 130))
    assert figures.fragmentation == 0  # while c waited, no GPU was free
    assert (figures.events, figures.finished_jobs, figures.unfinished_jobs) == (6, 3, 0)


def test_backfill_and_none() -> None:
    """A small job behind a large one that has to wait: it overtakes unless the window is one job wide."""
    jobs = [job("large", 0, 100, 3), job("huge", 1, 100, 4), job("small", 2, 10, 1)]
    assert ends(simulation(jobs)) == {"large": 100, "huge": 200, "small": 12}
    assert ends(simulation(jobs, backfill_window=1)) == {"large": 100, "huge": 200, "small": 210}


def test_nodes_take_their_time() -> None:
    """A container needs 5 s to start, and its GPU is free 2 s after the stop: both delay everybody behind."""
    options = Options(latency=Latency(start_s=5, stop_s=2))
    slow = simulation([job("a", 0, 100, 4), job("b", 10, 20, 4)], "srtf", options=options)
    # b preempts a at 10 (a has run 5 s), starts at 12 + 5 and ends at 37; a starts again at 42 with 95 s
    # left.
    assert ends(slow) == {"b": 37, "a": 137}
    assert slow.figures(1, 1).preemptions == 1


def test_a_node_is_not_waited_for_longer_than_the_grace() -> None:
    """A script that ignores SIGTERM is killed after ten seconds, as on a real node."""
    options = Options(latency=Latency(stop_s=3_600))
    assert ends(simulation([job("a", 0, 100, 4), job("b", 10, 20, 4)], "srtf", options=options)) == {
        "b": 40,
        "a": 130,
    }


@pytest.mark.parametrize("profile", PROFILES)
def test_the_ledger_alone_rebuilds_the_state(profile: str) -> None:
    """Whoever reads the simulated ledger folds the very state that the placer decided on (LAW 2)."""
    values: list[bytes] = []
    found = simulation(BUSY, profile, "2x4+1x8", sink=values.append)
    replica = Replica()
    taken = 0
    while found.step():
        for offset in range(taken, len(values)):
            assert replica.take(values[offset], offset) is not None
        taken = len(values)
        assert replica.head == found.cell.head
    assert dump(replica.state) == dump(found.cell.state)
    assert check(replica.state) == []
    assert found.figures(1, 1).finished_jobs == len(BUSY)
    assert found.meter.held == 0


class HalvedByNeighbours(JobModel):
    """A job model for this test: two jobs on one node run at half speed."""

    name = "halved"
    neighbours_matter = True

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        return 0.5 if neighbours else 1.0


def test_work_flows_by_the_neighbours() -> None:
    """b comes beside a after 40 s: both run at half speed until a has ended, then b alone."""
    work = SteadyWork(HalvedByNeighbours())
    for one in (job("a", 0, 100), job("b", 40, 100)):
        work.admit(one, one.submit_s)
    work.started("a", {"n": Allocation()}, 0.0)
    assert work.next_s() == 100
    assert work.advance(40.0).ended == []
    work.started("b", {"n": Allocation()}, 40.0)
    assert work.next_s() == 160  # 60 s of a's work at half speed
    assert work.advance(160.0).ended == [End("a", 160.0)]
    assert work.next_s() == 200  # b has done 60 of 100
    work.stopped("b", 180.0)
    assert work.next_s() is None
    work.started("b", {"m": Allocation()}, 500.0)
    assert work.next_s() == 520


def test_records_tell_what_happened() -> None:
    """A preemption in the ledger: who gave way, that it queued again, and its second attempt."""
    values: list[bytes] = []
    ends(simulation([job("a", 0, 100, 4), job("b", 10, 20, 4)], "srtf", sink=values.append))
    sent = [
        (fact["type"], fact["data"].get("job_id")) for value in values for fact in json.loads(value)["facts"]
    ]
    kinds = [kind.split(".")[1:3] for kind, job_id in sent if job_id == "a"]
    assert kinds == [
        ["job", "submitted"],
        ["job", "estimated"],
        ["placement", "decided"],
        ["job", "preempted"],
        ["stop", "decided"],
        ["job", "requeued"],
        ["placement", "decided"],
        ["job", "ended"],
    ]
