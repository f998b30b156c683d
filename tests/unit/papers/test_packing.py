"""Best fit, dot-product, clustering, packing and the fragmentation gradient: by hand, and against the plain
rules."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.ledger.check.check import check
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.state import CellState
from penstock.model.inputs import external_events
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import ResourceVector
from penstock.scheduling.profiles import definition_of, profile_for
from penstock.scheduling.stages.protocols import Policy
from penstock_papers.baselines.fgd import recent_tasks, typical_tasks
from penstock_papers.settings import FgdSettings, TypicalTask
from tests.papers.baselines import packing_reference as reference
from tests.support.chance import sure_range
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.support.own_settings import with_own

WHOLE_GPU_TASK = (TypicalTask(cores=1, gpus=1, count=1),)
FAMILY = ("best-fit", "dot-product", "clustering", "packing", "fgd")


def need(gpus: int = 1, cores: int = 1, share: int = 1_000, memory: int = 0) -> ResourceVector:
    return ResourceVector(
        gpus=gpus, cores=cores, gpu_share_milli=share, host_memory_mib=64, gpu_memory_mib=memory
    )


def policy(name: str, typical: tuple[TypicalTask, ...] = ()) -> Policy:
    return profile_for(with_own(name, FgdSettings(typical_tasks=typical))).place


def runs(state: CellState, job_id: str, node: str, what: ResourceVector) -> None:
    b.placed_on(state, b.queued(state, job_id, worker=what), node)


def asked(state: CellState, what: ResourceVector, of: Policy, job_id: str = "asked") -> Plan:
    plan = of.place(state, b.queued(state, job_id, worker=what), LazyRng(7, job_id))
    assert plan is not None
    return plan


def scores(plan: Plan) -> list[tuple[str, float]]:
    return [(candidate.nodes[0], -candidate.score) for candidate in plan.explanation.candidates]


def test_best_fit_leaves_least() -> None:
    """The largest node has 64 cores and 8 GPUs. A task of 2 GPUs and 8 cores, by hand.

    n0 empty: 56/64 and 6/8 are left: 100 · (1 − ½ · 1.625) = 18.75. n1 with 4 GPUs and 32 cores taken: 24/64
    and 2/8: 68.75. n2 has 2 GPUs and 16 cores: 8/64 and nothing: 93.75. All are cut to whole numbers.
    """
    state = b.cell_of([b.node("n0"), b.node("n1"), b.node("n2", gpus=2, cores=16)])
    runs(state, "half", "n1", need(4, 32))
    assert scores(asked(state, need(2, 8), policy("best-fit"))) == [("n2", 93), ("n1", 68), ("n0", 18)]


def test_dot_product_looks_for_nodes_unlike_the_task() -> None:
    """The same cell. n0: ½ · (1 · 8/64 + 1 · 2/8) = 0.1875: 81.25. n1 and its half: 90.625. n2: 95.3125."""
    state = b.cell_of([b.node("n0"), b.node("n1"), b.node("n2", gpus=2, cores=16)])
    runs(state, "half", "n1", need(4, 32))
    assert scores(asked(state, need(2, 8), policy("dot-product"))) == [("n2", 95), ("n1", 90), ("n0", 81)]


def test_clustering_keeps_classes_apart() -> None:
    """Four nodes of 8 GPUs: one with a pair, one with a pair and a single, one with a share, one empty.

    A pair: 25 · 2/8 = 6 and 75 for its like; 25 · 3/8 = 9 and 50 for the mixed node; 25 for the empty one;
    the shared one only has 25 · 0.5/8 = 1.
    """
    state = b.cell(nodes=4)
    runs(state, "pair", "n0", need(2))
    runs(state, "pair-2", "n1", need(2))
    runs(state, "single", "n1", need(1))
    runs(state, "part", "n2", need(1, share=500))
    found = scores(asked(state, need(2), policy("clustering")))
    assert found == [("n0", 81), ("n1", 59), ("n3", 25), ("n2", 1)]
    assert scores(asked(state, need(1, share=300), policy("clustering"), "part-2"))[0] == ("n2", 76)
    assert {score for _, score in scores(asked(state, need(0), policy("clustering"), "cores"))} == {0}


def test_packing_prefers_given_gpus_then_given_nodes() -> None:
    """n0 untouched: 33 − 4. n1 has a whole GPU taken: 50 − 1. n2 shares a GPU of which 400 are left: 100 −
    4."""
    state = b.cell(nodes=3, gpus=4)
    runs(state, "whole", "n1", need(1))
    runs(state, "part", "n2", need(1, share=600))
    assert scores(asked(state, need(1, share=300), policy("packing"))) == [("n2", 96), ("n1", 49), ("n0", 29)]
    assert scores(asked(state, need(3), policy("packing"), "three")) == [("n1", 47), ("n2", 47), ("n0", 29)]


def test_the_gradient_fills_the_hole_and_names_the_gpu() -> None:
    """What is typical here takes a whole GPU; so half of one is a hole. By hand, for a task of half a GPU:

    n1 has GPU 0 half free. There: F falls from 500 to 0, 100/(1 + e^−0.5) = 62.2. On its GPU 1: F rises from
    500 to 1,000, for no whole GPU is left: 37.8. On the empty n0: F rises from 0 to 500: 37.8 too.
    """
    state = b.cell(nodes=2, gpus=2)
    runs(state, "part", "n1", need(1, share=500))
    plan = asked(state, need(1, share=500), policy("fgd", WHOLE_GPU_TASK))
    assert scores(plan) == [("n1", 62), ("n0", 37)]
    assert plan.gpus == ((0,),)


def test_a_task_that_changes_nothing_scores_exactly_half() -> None:
    """A task that only computes on cores leaves the GPUs as useful as before: 50, and the lowest ordinal."""
    typical = tuple(TypicalTask(cores=1, gpus=1, gpu_share_milli=s, count=c) for s, c in ((100, 3), (700, 7)))
    state = b.cell(nodes=3, gpus=4)
    runs(state, "part", "n2", need(1, share=370))
    plan = asked(state, need(0), policy("fgd", typical))
    assert scores(plan) == [("n0", 50), ("n1", 50), ("n2", 50)]


def test_what_is_typical_comes_from_the_cell_where_the_settings_name_nothing() -> None:
    """95 % of tasks: 19 of 20 are parts of 400, and the one rare giant does not count."""
    vectors = [(need(1, share=400), ())] * 19 + [(need(8), ())]
    assert typical_tasks(vectors) == (TypicalTask(cores=1, gpus=1, gpu_share_milli=400, count=19),)
    state = b.cell(nodes=2, gpus=8)
    for i in range(8):
        runs(state, f"part-{i}", "n0", need(1, share=400))
    job = b.queued(state, worker=need(1, share=600))
    configured = policy("fgd", recent_tasks(state))
    assert policy("fgd").place(state, job, LazyRng(7, "x")) == configured.place(state, job, LazyRng(7, "x"))
    assert recent_tasks(state)[0].count == 8


def test_random_draws_each_fitting_gpu_equally_often() -> None:
    """A node with GPU 0 full, 1 half given and 2 free, and a task of 0.4: GPUs 1 and 2 come up equally
    often."""
    state = b.cell(nodes=1, gpus=3)
    runs(state, "full", "n0", need(1))
    runs(state, "half", "n0", need(1, share=500))
    job = b.queued(state, worker=need(1, share=400))
    counts: Counter[tuple[tuple[int, ...], ...] | None] = Counter()
    for i in range(200):
        plan = policy("random").place(state, job, LazyRng(7, f"event-{i}"))
        assert plan is not None
        counts[plan.gpus] += 1
    assert set(counts) == {((1,),), ((2,),)}
    assert counts[((1,),)] in sure_range(0.5, 200)


class Churn:
    """A cell of mixed nodes in which tasks come and go, and once in a while a GPU breaks."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        shapes = ((8, 96, "A"), (2, 104, "B"), (4, 32, "A"), (1, 16, "B"), (8, 128, "C"), (0, 64, "C"))
        self.state = b.cell_of(
            [
                b.node(f"n{i}", gpus=gpus, cores=cores, gpu_model=model, host_memory_mib=4_096)
                for i in range(12)
                for gpus, cores, model in [shapes[i % len(shapes)]]
            ]
        )
        self.running: list[str] = []

    def task(self) -> tuple[ResourceVector, tuple[str, ...]]:
        """What is asked next, and on which models."""
        share = int(self.rng.choice([1_000, 1_000, 810, 470, 320]))
        gpus = 1 if share < 1_000 else int(self.rng.choice([0, 1, 1, 2, 4, 8]))
        cores = int(self.rng.integers(1, 24))
        memory = int(self.rng.choice([0, 0, 6_000]))
        return need(gpus, cores, share, memory), ("A", "B") if self.rng.random() < 0.2 else ()

    def leave(self) -> None:
        gone = self.running.pop(int(self.rng.integers(len(self.running))))
        b.exited(self.state, self.state.jobs[gone])

    def trouble(self) -> None:
        node = self.state.nodes[f"n{self.rng.integers(12)}"]
        if node.spec.gpus:
            gpu = int(self.rng.integers(len(node.spec.gpus)))
            b.apply(
                self.state,
                external_events.GpuFaulted(node_id=node.spec.node_id, gpu=gpu, fault="xid", code=79),
            )


@pytest.mark.parametrize("profile", FAMILY)
@pytest.mark.parametrize("seed", range(4))
def test_the_plain_rules_choose_the_same(profile: str, seed: int) -> None:
    """A day of a cell under one placer, which caches scores of nodes; a placer that has just started has an
    empty cache.

    Both must choose what the rules, followed line by line, choose at this moment: the node, the score, the
    GPU.
    """
    churn = Churn(seed)
    state = churn.state
    typical = typical_tasks([churn.task() for _ in range(60)])
    cached = policy(profile, typical)
    for step in range(120):
        if churn.running and churn.rng.random() < 0.3:
            churn.leave()
            continue
        if step % 40 == 39:
            churn.trouble()
        what, models = churn.task()
        job = b.queued(state, f"job-{step}", worker=what, gpu_models=models)
        right = reference.choice(state, job.demand, profile, typical)
        plan = cached.place(state, job, LazyRng(0, "x"))
        assert plan == policy(profile, typical).place(state, job, LazyRng(0, "x"))
        if right is None:
            assert plan is None
            continue
        assert plan is not None
        found = (plan.nodes[0], -plan.explanation.candidates[0].score, plan.gpus[0][0] if plan.gpus else None)
        assert found == right
        b.placed(state, job, cached)
        assert job.status is JobStatus.LAUNCHING
        churn.running.append(job.job_id)
        assert check(state) == []
    assert len(churn.running) > 10


def test_typical_tasks_survive_the_placer_in_the_ledger() -> None:
    """A placer takes over: what is typical it reads from the term's record, as does whoever asks why a job
    waits."""
    typical = typical_tasks([(need(1, share=400), ("A",)), (need(1, share=700), ()), (need(2), ())])
    driver = CellDriver(with_own("fgd", FgdSettings(typical_tasks=typical)))
    driver.join(node_spec("n0", 2), node_spec("n1", 2))
    driver.submit("first", None, msgspec.structs.replace(estimate(1), worker=need(1, share=300)))
    follower = driver.follower.state
    assert definition_of("fgd").own(follower.settings) == FgdSettings(typical_tasks=typical)
    read_back = profile_for(follower.settings).place
    for what in (need(1, share=400), need(2), need(0), need(1, share=700)):
        job = b.queued(follower, f"{what.gpus}-{what.gpu_share_milli}", worker=what)
        assert read_back.place(follower, job, LazyRng(0, "x")) == policy("fgd", typical).place(
            follower, job, LazyRng(0, "x")
        )
    assert dump(load(dump(follower))) == dump(follower)
