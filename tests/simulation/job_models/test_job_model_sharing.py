"""What jobs that compute side by side take from each other, on numbers that can be followed by hand."""

from typing import Literal

import msgspec
import numpy as np
import pytest

from penstock.model.nouns.types import TaskPlacement
from penstock.simulator.job_models.measurements.steps import StageTimes
from penstock.simulator.job_models.model import (
    Allocation,
    Constant,
    NotMeasured,
    Placement,
    allocations,
)
from penstock.simulator.job_models.sharing import Bandwidth, Links, Phases, SharedNode, flows_of, most_flows
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.jobs import Stages, TraceJob

WORKER, SERVER = Allocation((0,), 1), Allocation((), 1, workers=0, parameter_servers=1)
BOTH = Allocation((0,), 2, workers=1, parameter_servers=1)


def with_server(job_id: str, network_ms: float = 60.0) -> TraceJob:
    """One parameter server, two workers; across nodes an iteration takes 100 ms, `network_ms` of them
    network."""
    stages = Stages(100.0, 0.0, 100.0 - network_ms, network_ms)
    return TraceJob(job_id, 0, 100, 2, "m", stages=stages, workers=2, parameter_servers=1)


APART: Placement = {"a": WORKER, "b": WORKER, "c": SERVER}
HALF: Placement = {"a": BOTH, "b": WORKER}
TOGETHER: Placement = {"a": Allocation((0, 1), 3, workers=2, parameter_servers=1)}


def test_flows_are_the_pairs_with_one_end_on_a_node() -> None:
    """A parameter server talks to each worker; a worker beside it needs no link, two elsewhere share the
    server's."""
    one = with_server("j")
    assert flows_of(one, APART) == {"a": 1, "b": 1, "c": 2}
    assert flows_of(one, HALF) == {"a": 1, "b": 1}
    assert flows_of(one, TOGETHER) == {}
    assert most_flows(one, APART) == 2
    ring = TraceJob("r", 0, 100, 4)
    assert flows_of(ring, {"a": Allocation((0, 1)), "b": Allocation((0, 1))}) == {"a": 1, "b": 1}
    assert flows_of(ring, {"a": Allocation((0, 1, 2, 3))}) == {}
    assert flows_of(ring._replace(inference=True), {"a": WORKER, "b": WORKER}) == {}, "nothing to exchange"


def test_network_time_is_paid_for_what_crosses() -> None:
    """40 ms on one node; 40 + 60 with every task apart; 40 + 30 when one worker sits beside the server."""
    job_model, one = StageTimes(), with_server("j")
    assert job_model.speed(one, TOGETHER, ()) == 1
    assert job_model.speed(one, APART, ()) == pytest.approx(0.4)
    assert job_model.speed(one, HALF, ()) == pytest.approx(4 / 7)
    assert job_model.network_share(one, TOGETHER) == 0
    assert job_model.network_share(one, APART) == pytest.approx(0.6)
    assert job_model.network_share(one, HALF) == pytest.approx(3 / 7)
    with pytest.raises(NotMeasured, match="job j has no stage times"):
        job_model.work_s(one._replace(stages=None))


def test_links_are_shared_by_the_time_that_others_send() -> None:
    """Two equal jobs apart on the same three nodes: each server's link carries 2 flows, and 2 more for 60 %
    of the time: 3.2 instead of 2. Network time grows by 1.6: 40 + 96 ms."""
    job_model = Links(StageTimes())
    one, other = with_server("j"), with_server("k")
    assert job_model.speed(one, APART, ()) == pytest.approx(0.4), "alone as the inner job model has it"
    assert job_model.speed(one, APART, [job_model.neighbour(other, APART)]) == pytest.approx(40 / 136)
    assert job_model.speed(one, APART, [job_model.neighbour(other, TOGETHER)]) == pytest.approx(0.4), (
        "it crosses nothing"
    )
    assert job_model.speed(one, TOGETHER, [job_model.neighbour(other, APART)]) == 1, "it needs no link"
    beside = {"c": WORKER, "x": WORKER, "y": SERVER}
    loads = 40 + 60 * (2 + 1 * 0.6) / 2  # one flow of the other on the server's link
    assert job_model.speed(one, APART, [job_model.neighbour(other, beside)]) == pytest.approx(40 / loads)
    aside = {"x": WORKER, "y": WORKER, "b": SERVER}
    loads = 40 + 60 * (1 + 2 * 0.6) / 2  # b's link is now busier than the server's: 2.2 instead of 2
    assert job_model.speed(one, APART, [job_model.neighbour(other, aside)]) == pytest.approx(40 / loads)


def test_a_node_is_shared_in_proportion_to_cores() -> None:
    """Three containers on one node: a third each; with 2 cores of 4 in all, half; the slowest part sets the
    pace."""
    job_model = SharedNode(Constant())
    one, other = TraceJob("j", 0, 100, 0), TraceJob("k", 0, 100, 0)
    core, two = {"n": Allocation((), 1)}, {"n": Allocation((), 2)}
    assert job_model.speed(one, core, ()) == 1
    assert job_model.speed(
        one, core, [job_model.neighbour(other, core), job_model.neighbour(other, core)]
    ) == pytest.approx(1 / 3)
    assert job_model.speed(
        one, two, [job_model.neighbour(other, core), job_model.neighbour(other, core)]
    ) == pytest.approx(1 / 2)
    apart = {"n": Allocation((), 1), "m": Allocation((), 1)}
    assert job_model.speed(
        one, apart, [job_model.neighbour(other, {"m": Allocation((), 3)})]
    ) == pytest.approx(1 / 4)


def test_memory_bandwidth_hurts_from_three_quarters_on() -> None:
    """A language model beside CPU jobs: nothing up to 75 % of the bandwidth, half its speed at 100 % and
    beyond."""
    job_model = Bandwidth(Constant())
    place = {"n": Allocation((0,), 1)}
    bert = TraceJob("j", 0, 100, 1, "bert", memory_bandwidth=0.1)

    def beside(asked: float) -> float:
        hog = TraceJob("h", 0, 100, 0, memory_bandwidth=asked)
        return job_model.speed(bert, place, [job_model.neighbour(hog, {"n": Allocation((), 8)})])

    assert beside(0.65) == 1
    assert beside(0.775) == pytest.approx(0.75)
    assert beside(0.9) == pytest.approx(0.5)
    assert beside(1.0) == pytest.approx(0.5)
    hog = TraceJob("h", 0, 100, 0, memory_bandwidth=1.0)
    assert job_model.speed(hog, place, [job_model.neighbour(bert, place)]) == 1, (
        "CPU jobs suffer nothing: an assumption"
    )
    spread = TraceJob("s", 0, 100, 0, memory_bandwidth=1.0)
    halves = {"n": Allocation((), 4), "m": Allocation((), 4)}
    assert job_model.speed(bert, place, [job_model.neighbour(spread, halves)]) == 1, (
        "half of its demand is elsewhere"
    )


class Anew(Bandwidth):
    """Every job's speed is computed with each change of its neighbours."""

    def slowed_by_others(self, job: TraceJob) -> bool:
        return True


@pytest.mark.parametrize("seed", range(5))
def test_jobs_that_are_not_slowed_by_others_keep_their_speed(seed: int) -> None:
    """Jobs on one to three of five nodes come, are stopped and get other cores: all end as if each speed were
    computed at each change."""
    rng = np.random.default_rng(seed)
    works = [SteadyWork(Bandwidth(Constant()), watched=True), SteadyWork(Anew(Constant()), watched=True)]
    now_s, started = 0.0, dict[str, Placement]()
    for number in range(200):
        now_s += float(rng.exponential(10.0))
        job_id, choice = f"j{number}", rng.random()
        gpus = int(rng.integers(2))
        cpu_job = TraceJob(
            job_id, now_s, float(rng.exponential(200.0)) + 1.0, 0, cores=8.0, memory_bandwidth=0.4
        )
        job = (
            cpu_job._replace(gpus=1, model=("bert", "res18", "m")[int(rng.integers(3))]) if gpus else cpu_job
        )
        nodes = [f"n{node}" for node in rng.choice(5, int(rng.integers(1, 4)), replace=False)]
        place: Placement = {node: Allocation((), float(rng.integers(1, 9))) for node in nodes}
        other = list(started)[int(rng.integers(len(started)))] if started else ""
        fewer = {node: held._replace(bandwidth_percent=10) for node, held in started.get(other, {}).items()}
        for work in works:
            if choice < 0.7 or not other:
                work.admit(job, now_s)
                work.started(job_id, place, now_s)
            elif choice < 0.85:
                work.changed(other, fewer, now_s)
            else:
                work.stopped(other, now_s)
        if choice < 0.7 or not other:
            started[job_id] = place
        assert works[0].paces() == works[1].paces()
        assert works[0].advance(now_s) == works[1].advance(now_s)
    while (at_s := works[0].next_s()) is not None:
        assert works[1].next_s() == at_s
        assert works[0].advance(at_s) == works[1].advance(at_s)
    assert works[1].next_s() is None
    bert = TraceJob("b", 0, 100, 1, "bert")
    assert Bandwidth(Constant()).slowed_by_others(bert)
    assert not Bandwidth(Constant()).slowed_by_others(bert._replace(gpus=0, model=""))
    assert Bandwidth(SharedNode(Constant())).slowed_by_others(bert._replace(gpus=0, model=""))


def test_phases_come_on_top_of_what_the_inner_truth_has() -> None:
    """A job that anyway needs 18 + 5 s, in a container that takes 10 s more to come and 1 s more to go."""
    job_model = Phases(Phases(Constant(), 18.0, 5.0), 10.0, 1.0)
    one = TraceJob("j", 0, 100, 1)
    assert (job_model.start_up_s(one), job_model.save_s(one)) == (28, 6)
    assert not job_model.neighbours_matter
    assert Phases(SharedNode(Constant())).neighbours_matter


def test_what_a_job_holds_is_gathered_node_by_node() -> None:
    """Two workers and a parameter server of one job on one node, a third worker on another, in order of
    rank."""

    def task(
        rank: int, role: Literal["ps", "worker"], node_id: str, gpus: tuple[int, ...], cores: int
    ) -> TaskPlacement:
        used = tuple(range(10 * rank, 10 * rank + cores))
        task_id = f"j.1.{rank}"
        return TaskPlacement(
            task_id=task_id, role=role, rank=rank, node_id=node_id, gpus=gpus, cores=used, host_memory_mib=100
        )

    tasks = [
        task(0, "worker", "b", (0, 1), 4),
        task(1, "worker", "b", (3,), 2),
        task(2, "worker", "a", (2,), 2),
        task(3, "ps", "b", (), 1),
    ]
    found = allocations(tasks)
    assert list(found) == ["b", "a"]
    assert found["b"] == Allocation((0, 1, 3), 7, 1_000, workers=2, parameter_servers=1, host_memory_mib=300)
    assert found["a"] == Allocation((2,), 2, 1_000, workers=1, parameter_servers=0, host_memory_mib=100)
    half = msgspec.structs.replace(tasks[2], gpu_share_milli=500)
    assert allocations([half])["a"].share_milli == 500
