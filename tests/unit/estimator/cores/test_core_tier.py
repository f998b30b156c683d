"""How many cores a training begins with in the service, by CODA's rules."""

import msgspec
import pytest

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Category, Trait
from penstock_services.estimator.core.learning.limits import CORE_OWNERS, CORE_RUNS_OF_ONE
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import NO_CARD, Allocation, job_info
from penstock_services.estimator.core.resources.cores import CoresTier, PastCores
from penstock_services.estimator.core.resources.estimate import Guess, estimate
from tests.support.cluster.driver import node_spec


def job(
    category: Category | None = "cv",
    owner: str = "ada",
    gpus: int | None = None,
    *traits: Trait,
    workers: int = 1,
) -> JobSpec:
    return JobSpec(
        owner=owner,
        command=("python", "new.py"),
        category=category,
        traits=traits,
        workers=workers,
        resources=ResourceRequest(gpus=gpus),
    )


class Seen:
    """What a cell of nodes with 8 GPUs and 32 cores has seen of its owners' trainings."""

    def __init__(self) -> None:
        self.past, self.nodes = PastCores(), NodeCapacity()
        self.nodes.put(node_spec("node-1", 8))
        self.tier = CoresTier(self.past, self.nodes)

    def ran(self, spec: JobSpec, cores: int, busy: float = float("nan"), gpus: int = 1) -> None:
        run = Run(ended_ms=1, seq=1, busy_cores=busy)
        self.past.add(job_info(spec), Allocation(gpus, 1_000, cores, NO_CARD), run)

    def cores(self, spec: JobSpec) -> int:
        return estimate(spec, (self.tier,)).worker.cores


@pytest.mark.parametrize(("category", "cores"), [("cv", 3), ("nlp", 5), ("speech", 5)])
def test_the_first_training_begins_with_what_its_category_needs(category: Category, cores: int) -> None:
    """Carol's first job; nothing else is known of her, and the estimate says which rule that is."""
    found = estimate(job(category), (Seen().tier,))
    assert (found.worker.cores, found.tier, found.confidence) == (cores, "default", 0.1)
    assert found.source.endswith(f"; cores: the owner's first job of category {category}")


def test_traits_move_it_and_gpus_multiply_it() -> None:
    """CODA's three rules; a gang that cannot be on one node is held back by the network, not by its cores."""
    seen = Seen()
    assert seen.cores(job("cv", "ada", None, "pipelined", "many_weights")) == 1
    assert seen.cores(job("nlp", "ada", None, "heavy_preprocessing")) == 6
    assert seen.cores(job("cv", gpus=4)) == 12
    assert seen.cores(job("nlp", gpus=8)) == 32, "no more than the node has"
    assert seen.cores(job("nlp", gpus=8, workers=2)) == 2
    assert seen.cores(job("cv", gpus=0)) == 1, "no training: the default"


def test_what_the_owner_stored_busy_counts_and_not_what_he_asked_for() -> None:
    """Ada once asked for 24 cores and used two; her next vision job of another command begins with three,
    that of four GPUs with twelve. What she ran for speech says nothing about vision."""
    seen = Seen()
    seen.ran(job(), cores=24, busy=2.0)
    seen.ran(job("speech"), cores=20, busy=16.0)
    assert (seen.cores(job()), seen.cores(job(gpus=4))) == (3, 12)
    assert seen.cores(job("speech")) == 20
    seen.ran(job(), cores=4, busy=4.0)
    assert seen.cores(job()) == 5, "all were busy: it may have wanted more"
    assert "the most of 2 past jobs of the owner" in estimate(job(), (seen.tier,)).source


def test_unmeasured_runs_count_with_what_they_had() -> None:
    """A machine without CPU accounting: six cores for two GPUs were given, and are three for one."""
    seen = Seen()
    seen.ran(job(), cores=6, gpus=2)
    assert seen.cores(job()) == 3
    seen.ran(job(), cores=0)
    seen.ran(job(), cores=50, gpus=0)
    assert seen.cores(job()) == 3, "no cores, no GPUs: no training"


def test_without_a_category_all_of_the_owners_trainings_count_and_else_nothing() -> None:
    """Dave names no category. His first job gets the default of one core, which fits everywhere; then his
    past counts."""
    seen = Seen()
    assert seen.tier.guess(job(None, "dave"), b"") is None
    assert seen.cores(job(None, "dave")) == 1
    seen.ran(job("cv", "dave"), cores=4, busy=3.2)
    assert seen.cores(job(None, "dave")) == 4
    assert seen.tier.guess(job(None, "erin"), b"") is None


def test_it_only_fills_what_others_left_open() -> None:
    """A learned model answers first and knows no cores: the estimate is the model's, with the cores' source
    named."""

    class Model:
        def guess(self, spec: JobSpec, key: bytes) -> Guess:
            return Guess("model", 0.8, "process v3", gpu_memory_mib=4_096, model_version="v3")

    class Runs:
        def guess(self, spec: JobSpec, key: bytes) -> Guess:
            return Guess("nearest", 0.4, "two runs", cores=7)

    tier = Seen().tier
    found = estimate(job(), (Model(), tier))
    assert (found.tier, found.confidence, found.model_version) == ("model", 0.8, "v3")
    assert (found.worker.cores, found.worker.gpu_memory_mib) == (3, 4_096)
    assert found.source == "process v3; cores: the owner's first job of category cv"
    found = estimate(job(), (Runs(), tier))
    assert (found.worker.cores, found.source) == (7, "two runs")
    asked = msgspec.structs.replace(job(), resources=ResourceRequest(cores=9))
    assert estimate(asked, (tier,)).worker.cores == 9


def test_answers_follow_the_cell() -> None:
    """What was answered before is not repeated once there is a larger node, or another run."""
    seen = Seen()
    assert seen.cores(job("nlp", gpus=8)) == 32
    seen.nodes.put(node_spec("node-2", 8, cores=128))
    assert seen.cores(job("nlp", gpus=8)) == 40
    seen.nodes.remove("node-2")
    assert seen.cores(job("nlp", gpus=8)) == 32
    seen.ran(job("nlp"), cores=1, busy=0.5)
    assert seen.cores(job("nlp", gpus=8)) == 8


def test_memory_is_bounded() -> None:
    """A year of jobs, and more people than a cell has."""
    past = PastCores()
    for number in range(CORE_OWNERS + 10):
        past.add(job_info(job(owner=f"o{number}")), Allocation(1, 1_000, 2, NO_CARD), Run(1, 1))
    assert (len(past), past.of("o0")) == (CORE_OWNERS, ())
    for cores in range(1, 200):
        past.add(job_info(job()), Allocation(1, 1_000, cores, NO_CARD), Run(1, 1))
    assert len(past.of("ada")) == CORE_RUNS_OF_ONE
    assert past.of("ada")[0].cores == 200 - CORE_RUNS_OF_ONE
