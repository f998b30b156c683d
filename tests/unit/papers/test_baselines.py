"""The baselines choose by their published rule, and every policy meets the port's contract."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang
from penstock.cluster.view import ClusterView
from penstock.ledger.check.check import check
from penstock.ledger.state.index import lowest
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate
from penstock.scheduling import profiles
from penstock.scheduling.profiles import UnknownProfile, profile_for
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, job_spec, node_spec


def policy(name: str):
    return profile_for(PlacerSettings(profile=name)).place


def chance(event_id: str = "event-1") -> LazyRng:
    return LazyRng(7, event_id)


def test_first_fit_takes_the_earliest_node_with_room():
    """n0 is full, n1 has one GPU left: a job of one GPU goes there, one of two goes on to n2."""
    state = b.cell(nodes=3, gpus=4)
    b.placed_on(state, b.queued(state, "full", worker=b.need(gpus=4)), "n0")
    b.placed_on(state, b.queued(state, "nearly", worker=b.need(gpus=3)), "n1")
    one = policy("fifo").place(state, b.queued(state, "one"), chance())
    two = policy("fifo").place(state, b.queued(state, "two", worker=b.need(gpus=2)), chance())
    assert one is not None
    assert one.nodes == ("n1",)
    assert one.explanation.rejected == {"gpus_busy": 1}
    assert two is not None
    assert two.nodes == ("n2",)
    assert two.explanation.rejected == {"gpus_busy": 2}


def test_random_draws_every_feasible_node_equally_often_and_repeats_for_the_same_event():
    """300 submissions over three open nodes (a fourth is full): each draws about a third."""
    state = b.cell(nodes=4, gpus=2)
    b.placed_on(state, b.queued(state, "full", worker=b.need(gpus=2)), "n2")
    job = b.queued(state)
    counts = Counter()
    for i in range(300):
        plan = policy("random").place(state, job, chance(f"event-{i}"))
        again = policy("random").place(state, job, chance(f"event-{i}"))
        assert plan is not None
        assert plan == again
        counts.update(plan.nodes)
    assert set(counts) == {"n0", "n1", "n3"}
    assert all(70 <= count <= 130 for count in counts.values()), counts


def test_even_spreads_gpu_jobs_by_share_and_cpu_jobs_by_free_cores():
    """n0 has half of its GPUs busy, n1 a quarter, n2 none: a gang of three fills up from the emptiest."""
    state = b.cell(nodes=3, gpus=4, cores=16)
    b.placed_on(state, b.queued(state, "half", worker=b.need(gpus=2)), "n0")
    b.placed_on(state, b.queued(state, "quarter", worker=b.need(gpus=1, cores=8)), "n1")
    gang = policy("even").place(state, b.queued(state, "gang", workers=3), chance())
    assert gang is not None
    assert gang.nodes == ("n2", "n1", "n2")  # shares 0; then 1/4 against 1/4: the lower ordinal; then 1/4
    cpu = policy("even").place(state, b.queued(state, "cpu", workers=2, worker=b.need(gpus=0)), chance())
    assert cpu is not None
    assert cpu.nodes == ("n2", "n0")  # 16, then 15 (n0) against 15 (n2, with the first task)
    assert [c.score for c in cpu.explanation.candidates] == [-15.0, -15.0, -8.0]


def test_kubernetes_prefers_the_emptier_and_the_more_balanced_node():
    """By hand, a job of 1 GPU, 4 cores, 16 GiB on nodes of 4 GPUs, 16 cores, 64 GiB.

    n0 empty: all shares 1/4: 100 · 3/4 + 100 = 175. n1 with 4 cores taken: shares 1/2, 1/4, 1/4: mean 1/3,
    deviation √(1/72): 66.67 + 88.21 = 154.88.
    """
    state = b.cell(nodes=2, gpus=4, cores=16, host_memory_mib=65_536)
    b.placed_on(state, b.queued(state, "cpu", worker=b.need(gpus=0, cores=4, host_memory_mib=0)), "n1")
    job = b.queued(state, worker=b.need(gpus=1, cores=4, host_memory_mib=16_384))
    plan = policy("k8s-default").place(state, job, chance())
    assert plan is not None
    assert plan.nodes == ("n0",)
    assert [c.score for c in plan.explanation.candidates] == pytest.approx([-175.0, -154.8816], abs=1e-3)


def test_kubernetes_scores_a_bounded_sample_of_a_large_cell():
    """150 empty nodes: what is scored depends on the event alone, and differs between events."""
    state = b.cell(nodes=150, gpus=2)
    job = b.queued(state)
    plans = [policy("k8s-default").place(state, job, chance(f"event-{i}")) for i in range(20)]
    assert plans == [policy("k8s-default").place(state, job, chance(f"event-{i}")) for i in range(20)]
    assert len({plan.nodes for plan in plans if plan is not None}) > 1


def test_an_unknown_profile_names_those_that_exist():
    """An operator mistypes `--profile`."""
    with pytest.raises(UnknownProfile, match=r"'liqid' is not a profile; .*fifo.*k8s-default.*liquid"):
        policy("liqid")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    loads=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 3)), max_size=12),
    workers=st.integers(1, 20),
    gpus=st.integers(0, 3),
    cores=st.integers(0, 9),
    memory=st.sampled_from([0, 1_000, 30_000]),
    bandwidth=st.sampled_from([0, 1_000, 7_000]),
)
def test_as_many_equal_workers_fit_as_first_fit_places(
    loads: list[tuple[int, int, int]], workers: int, gpus: int, cores: int, memory: int, bandwidth: int
):
    """Whatever runs already, and whichever resource runs out first: counted at once, and placed one after the
    other."""
    state = b.cell(nodes=4, gpus=4, cores=32, host_memory_mib=65_536)
    for i, (load_gpus, load_cores, at) in enumerate(loads):
        load = b.queued(state, f"load-{i}", worker=b.need(gpus=load_gpus, cores=load_cores))
        if state.nodes[f"n{at}"].free().fits(load.demand.worker):
            b.placed_on(state, load, f"n{at}")
    need = b.need(gpus=gpus, cores=cores, host_memory_mib=memory, bandwidth_mbps=bandwidth)
    demand = b.queued(state, workers=workers, worker=need).demand
    gang = Gang(state, demand)
    while len(gang.workers) < workers and (nodes := gang.open(is_worker=True)):
        gang.take(lowest(nodes), is_worker=True)
    assert ClusterView(state).tasks_that_fit(demand) == len(gang.workers)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(profiles.names()),
    loads=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12),
    workers=st.integers(1, 6),
    servers=st.integers(0, 2),
    gpus=st.integers(0, 4),
    share=st.sampled_from([1_000, 1_000, 600, 300]),
    memory=st.sampled_from([1_000, 30_000]),
)
def test_every_policy_places_whole_gangs_soundly_or_not_at_all(
    name: str, loads: list[tuple[int, int]], workers: int, servers: int, gpus: int, share: int, memory: int
):
    """Whatever runs already: a plan covers all tasks, its decision folds without over-booking, and a cell
    that could hold the (identical) tasks is never refused."""
    state = b.cell(nodes=4, gpus=4, racks=2, domains=2, host_memory_mib=65_536)
    for i, (load_gpus, at) in enumerate(loads):
        load = b.queued(state, f"load-{i}", worker=b.need(gpus=load_gpus))
        if state.nodes[f"n{at}"].free().fits(load.demand.worker):
            b.placed_on(state, load, f"n{at}")
    share = share if gpus == 1 else 1_000
    job = b.queued(
        state,
        workers=workers,
        parameter_servers=servers,
        worker=b.need(gpus=gpus, host_memory_mib=memory, gpu_share_milli=share),
        parameter_server=b.need(gpus=0, host_memory_mib=500),
    )
    room = sum(
        min(
            node.free().host_memory_mib // memory, node.free().gpus * (1_000 // share) // gpus if gpus else 99
        )
        for node in state.nodes.values()
    )
    plan = policy(name).place(state, job, chance())
    if plan is None:
        assert servers or room < workers
        return
    assert len(plan.nodes) == workers + servers
    why = plan.explanation
    assert why.candidates[0].nodes == plan.nodes
    assert len({c.nodes for c in why.candidates}) == len(why.candidates) <= 5
    assert why.margin is None or why.margin >= 0
    b.placed(state, job, policy(name))
    assert check(state) == []


@pytest.mark.parametrize("name", profiles.names())
def test_a_job_that_has_the_whole_cell_starts_where_it_fits(name: str) -> None:
    """A worker needs all of one node's memory, and its parameter server any memory. A policy that puts the
    server there first finds no place for the worker; in a cell with nobody else the job would wait for
    ever."""
    driver = CellDriver(PlacerSettings(profile=name))
    driver.join(node_spec("n1", 1), node_spec("n2", 0))
    memory_mib = driver.state.nodes["n1"].spec.host_memory_mib
    worker = b.need(gpus=1, host_memory_mib=memory_mib)
    server = b.need(gpus=0, host_memory_mib=1_024)
    need = Estimate(worker=worker, parameter_server=server, confidence=1.0, tier="user", source="a test")
    driver.submit("a", job_spec(ps=1), need)
    driver.at(60_000)
    nodes = [task.place.node_id for task in driver.job("a").tasks.values()]
    assert nodes == ["n1", "n2"]
