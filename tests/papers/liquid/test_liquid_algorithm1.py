"""Liquid §5.2, eq. 2 – 6 and Alg. 1: a hand-computed example, and the product against the plain loop."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.chance import LazyRng
from penstock.ledger.check.check import check
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.state import CellState
from penstock.model.inputs import external_events
from penstock.model.nouns.allowed import Allowed, models_of
from penstock.scheduling.place.liquid import Liquid, Network
from penstock_papers.liquid import Levels
from tests.papers.liquid import liquid_reference as reference
from tests.support.cluster import builders as b

CHANCE = LazyRng(0, "test")


def three_levels() -> CellState:
    """Six nodes of 4 GPUs. Domain A: rack 1 = {a, b}, rack 2 = {c, d, e}; domain B: rack 3 = {f}.

    Nodes that share: rack 1: 2, rack 2: 3, rack 3: 1; domain A: 5, domain B: 1; the cell: 6.
    """
    where = {
        "a": ("1", "A"),
        "b": ("1", "A"),
        "c": ("2", "A"),
        "d": ("2", "A"),
        "e": ("2", "A"),
        "f": ("3", "B"),
    }
    return b.cell_of([b.node(name, gpus=4, rack=rack, domain=dom) for name, (rack, dom) in where.items()])


def test_eq2_has_three_levels_beyond_the_node():
    """Two workers and a server may sit on one node, in one rack, across racks, or across domains."""
    state = three_levels()
    node = state.nodes
    assert reference.pair_cost(state, node["a"], node["a"], False) == 0
    assert reference.pair_cost(state, node["a"], node["b"], False) == 2
    assert reference.pair_cost(state, node["c"], node["e"], False) == 3
    assert reference.pair_cost(state, node["a"], node["c"], False) == 5
    assert reference.pair_cost(state, node["a"], node["f"], False) == 6
    levels = [reference.pair_cost(state, node["a"], node[other], True) for other in "abcf"]
    assert levels == [0, 1, 4, 40]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # λ = 1/2, one server (no GPU) and one worker (2 GPUs) on node a, the second worker (2 GPUs) on …
        # a: cost 0,  fitness −(4+0)/4           = −1;   score = 0 − 1/2
        ("a", -0.5),
        # b: cost 2,  fitness −2/4 − 2/4         = −1;   score = 1 − 1/2
        ("b", 0.5),
        # c: cost 5 (domain A has 5 nodes), fitness −1/2 − (2+1)/4 = −1.25; score = 2.5 − 0.625
        ("c", 1.875),
        # f: cost 6 (the cell has 6 nodes), fitness −1/2 − 2/4     = −1;    score = 3 − 1/2
        ("f", 2.5),
    ],
)
def test_eq4_to_6_by_hand(last: str, expected: float):
    """A worker's second home at every network level; node c already runs somebody's one-GPU job."""
    state = three_levels()
    b.placed_on(state, b.queued(state, "other"), "c")
    job = b.queued(state, "job", workers=2, parameter_servers=1, worker=b.need(gpus=2))
    plan = [
        reference.Placed(state.nodes["a"], False),
        reference.Placed(state.nodes["a"], True),
        reference.Placed(state.nodes[last], True),
    ]
    assert reference.score(state, plan, job.demand, 0.5, False) == expected


def test_alg1_by_hand():
    """The same job in the same cell: Alg. 1 step by step.

    Server (0 GPUs): fitness decides; c is used most (−1/4 against 0), so it goes to c.
    Worker 0: on c −(1+2)/4 at cost 0: score −0.375; d: 1.5 + ½(−1/4 − 1/2) = 1.125; the others cost 5 or 6.
    Worker 1: c has 1 GPU left, so the rack: d or e, cost 3: 1.5 + ½(−3/4 − 1/2) = 0.875; d comes first.
    a, b: 2.5 + ½(−3/4 − 1/2) = 1.875; f: 3 + ½(−3/4 − 1/2) = 2.375, which falls out of no top five.
    """
    state = three_levels()
    b.placed_on(state, b.queued(state, "other"), "c")
    job = b.queued(state, "job", workers=2, parameter_servers=1, worker=b.need(gpus=2))
    plan = Liquid(0.5).place(state, job, CHANCE)
    assert plan is not None
    assert plan.nodes == ("c", "d", "c")
    why = plan.explanation
    assert [(c.nodes[1], c.score) for c in why.candidates] == [
        ("d", 0.875),
        ("e", 0.875),
        ("a", 1.875),
        ("b", 1.875),
        ("f", 2.375),
    ]
    assert why.margin == 0.0
    assert (why.feasible, why.rejected) == (6, {})


def test_line_18_to_the_letter_spreads_a_gang():
    """Two one-GPU workers on empty nodes: together as the text means it, apart as in line 18."""
    state = b.cell(nodes=3, gpus=4)
    job = b.queued(state, workers=2)
    together = Liquid(0.5).place(state, job, CHANCE)
    apart = Liquid(0.5, distinct_nodes=True).place(state, job, CHANCE)
    assert together is not None
    assert together.nodes == ("n0", "n0")
    assert apart is not None
    assert apart.nodes == ("n0", "n1")
    four = b.queued(state, "four", workers=4)
    assert Liquid(0.5, distinct_nodes=True).place(state, four, CHANCE) is None
    assert Liquid(0.5).place(state, four, CHANCE) is not None


@st.composite
def clusters(draw: st.DrawFn) -> CellState:
    """Heterogeneous nodes, some jobs running on them, some nodes silent, some GPUs faulted."""
    specs = [
        b.node(
            f"n{i}",
            gpus=draw(st.sampled_from([0, 1, 2, 4, 4, 8])),
            rack=f"rack-{draw(st.integers(0, 2))}",
            domain=f"domain-{draw(st.integers(0, 1))}",
            cores=draw(st.sampled_from([4, 8, 32])),
            host_memory_mib=draw(st.sampled_from([8_000, 16_384, 50_000])),
            bandwidth_mbps=draw(st.sampled_from([1_000, 1_500, 10_000])),
            gpu_model=draw(st.sampled_from(["K80", "V100"])),
            gpu_memory_mib=draw(st.sampled_from([8_192, 16_384])),
        )
        for i in range(draw(st.integers(1, 8)))
    ]
    state = b.cell_of(specs)
    for i in range(draw(st.integers(0, 6))):
        worker = b.need(
            gpus=draw(st.integers(0, 3)),
            cores=draw(st.integers(0, 3)),
            host_memory_mib=draw(st.integers(0, 5_000)),
            gpu_memory_mib=0,
            bandwidth_mbps=draw(st.integers(0, 700)),
        )
        job = b.queued(state, f"load-{i}", worker=worker)
        node_id = draw(st.sampled_from([spec.node_id for spec in specs]))
        if state.nodes[node_id].free().fits(worker):
            b.placed_on(state, job, node_id)
    for spec in specs:
        if draw(st.integers(0, 9)) == 0:
            b.apply(state, external_events.NodeSuspected(node_id=spec.node_id, reason="silence"))
        if spec.gpus and draw(st.integers(0, 9)) == 0:
            b.apply(state, external_events.GpuFaulted(node_id=spec.node_id, gpu=0, fault="ecc"))
    return state


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    def vector(most_gpus: int) -> b.ResourceVector:
        return b.need(
            gpus=draw(st.integers(0, most_gpus)),
            cores=draw(st.integers(0, 4)),
            host_memory_mib=draw(st.sampled_from([0, 1_000, 4_096, 9_000])),
            gpu_memory_mib=draw(st.sampled_from([0, 10_000])),
            bandwidth_mbps=draw(st.sampled_from([0, 300, 1_000])),
        )

    return Demand(
        workers=draw(st.integers(1, 5)),
        worker=vector(4),
        parameter_servers=draw(st.sampled_from([0, 0, 1, 2])),
        parameter_server=vector(1),
        where=draw(st.sampled_from([(), *map(Allowed, ((), ("V100",), ("K80", "V100"), ("H100",)))])),
    )


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    state=clusters(),
    demand=demands(),
    weight=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    levels=st.booleans(),
    distinct_nodes=st.booleans(),
)
def test_the_product_decides_exactly_as_the_plain_loop(
    state: CellState, demand: Demand, weight: float, levels: bool, distinct_nodes: bool
):
    """Any cluster, any gang: the same nodes, the same score, the same top five, ties included."""
    job = b.queued(
        state,
        "job",
        workers=demand.workers,
        parameter_servers=demand.parameter_servers,
        gpu_models=models_of(demand.where),
        worker=demand.worker,
        parameter_server=demand.parameter_server,
    )
    before = [node.free() for node in state.nodes.values()]
    policy = Liquid(weight, Levels if levels else Network, distinct_nodes=distinct_nodes)
    plan = policy.place(state, job, CHANCE)
    right = reference.best_fit(state, job.demand, weight, levels=levels, distinct_nodes=distinct_nodes)
    assert [node.free() for node in state.nodes.values()] == before
    assert check(state) == []
    if right is None:
        assert plan is None
        return
    assert plan is not None
    assert plan.nodes == right.nodes
    why = plan.explanation
    assert [(c.score, c.nodes) for c in why.candidates] == [(v, n) for v, _, n in right.ranking[:5]]
    assert why.candidates[0].score == right.score
    assert why.feasible == sum(reference.fits(n, [], job.demand, True) for n in state.nodes.values())
    assert why.feasible + sum(why.rejected.values()) == len(state.nodes)
    b.placed_on(state, job, *plan.nodes)
    assert check(state) == []
