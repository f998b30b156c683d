"""Run times of jobs that tell their iterations, among everything else that an estimate says."""

import msgspec
import pytest

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.node_capacity import NodeCapacity, densest
from penstock_services.estimator.core.records.history import History, key_of
from penstock_services.estimator.core.resources.estimate import HistoryTier, Tier, estimate
from penstock_services.estimator.core.resources.nearest import Nearest, NearestTier
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import STEPS, Durations
from tests.support.cluster.driver import node_spec
from tests.unit.estimator.reports import month, ran, true_ms

SPEC = JobSpec(owner="ada", command=("python", "train.py"), model="resnet50", batch_size=64, iterations=5_000)


@pytest.fixture(scope="module")
def learned() -> InUse[Durations]:
    trained = STEPS.train(month(120), None)
    assert trained is not None
    return STEPS.read(trained.body, trained.sha256)


def nodes(*sizes: int, model: str = "T4") -> NodeCapacity:
    found = NodeCapacity()
    for number, gpus in enumerate(sizes):
        found.put(node_spec(f"{model}-{number}", gpus, model=model))
    return found


def tiers(
    history: History, nearest: Nearest, where: NodeCapacity, model: InUse[Durations] | None = None
) -> list[Tier]:
    steps = StepTier(history, nearest, where)
    if model is not None:
        steps.use(model)
    return [HistoryTier(history), steps, NearestTier(nearest)]


def job(gpus: int, workers: int = 1, **more: object) -> JobSpec:
    return msgspec.structs.replace(SPEC, resources=ResourceRequest(gpus=gpus), workers=workers, **more)


@pytest.mark.parametrize(
    ("gpus", "workers", "ring"), [(1, 1, (1,)), (4, 1, (4,)), (4, 2, (4, 4)), (2, 2, (4,))]
)
def test_a_new_job_is_reported_from_the_model(
    gpus: int, workers: int, ring: tuple[int, ...], learned: InUse[Durations]
) -> None:
    """Two nodes of four cards: a gang goes on as few of them as can be. Each worker has a batch of 64."""
    found = estimate(job(gpus, workers), tiers(History(), Nearest(), nodes(4, 4), learned))
    assert found.run_ms == pytest.approx(5_000 * true_ms(ring, 64 * workers), rel=0.1)
    assert found.tier == "default", "of what it needs nothing is known"
    assert "run time: 5,000 iterations of" in found.source
    assert found.model_version == learned.version


def test_what_nothing_is_known_of_stays_open(learned: InUse[Durations]) -> None:
    """No iterations, no batch size, half of a GPU, no such node, a gang that the cell cannot hold, another
    network."""
    for spec, where in [
        (job(1, iterations=None), nodes(4)),
        (job(1, batch_size=None), nodes(4)),
        (job(1, model=None), nodes(4)),
        (job(1, model="vgg16"), nodes(4)),
        (job(0), nodes(4)),
        (job(1), nodes()),
        (job(1), nodes(4, model="V100")),
        (job(1, gpu_models=("V100",)), nodes(4)),
        (job(4, 3), nodes(4, 4)),
        (msgspec.structs.replace(SPEC, resources=ResourceRequest(gpus=1, gpu_share_milli=500)), nodes(4)),
    ]:
        found = estimate(spec, tiers(History(), Nearest(), where, learned))
        assert (found.run_ms, found.model_version) == (None, None)
        assert "run time" not in found.source


def test_a_jobs_own_run_time_comes_first_while_its_iterations_are_the_same(learned: InUse[Durations]) -> None:
    """Ada runs her nightly job again, then for ten times as long: her own step times answer, and nobody's
    model."""
    history = History()
    for seq in range(1, 4):
        history.add(key_of(SPEC), ran(seq, step_ms=200.0, iterations=5_000).measured, "ada")
    found = estimate(job(1), tiers(history, Nearest(), nodes(4), learned))
    assert (found.tier, found.run_ms) == ("history", 1_000_000)
    assert "run time" not in found.source
    longer = estimate(job(1, iterations=50_000), tiers(history, Nearest(), nodes(4), learned))
    assert (longer.tier, longer.run_ms) == ("history", 50_000 * 200 + 4_000), "and launching and saving"
    assert longer.source.endswith(
        "run time: 50,000 iterations of 0.2 s, median of 3 runs like it and 4 s to launch and save"
    )
    wider = estimate(job(4, iterations=50_000), tiers(history, Nearest(), nodes(4), learned))
    assert learned.version in wider.source, "on four GPUs she never ran"
    unasked = estimate(
        msgspec.structs.replace(SPEC, iterations=None), tiers(history, Nearest(), nodes(4), learned)
    )
    assert unasked.run_ms == 1_000_000


def test_a_target_may_end_it_earlier(learned: InUse[Durations]) -> None:
    found = estimate(job(1, target_loss=0.1), tiers(History(), Nearest(), nodes(4), learned))
    assert "run time: at most 5,000 iterations" in found.source


def test_the_users_word_and_the_run_time_stand_side_by_side(learned: InUse[Durations]) -> None:
    asked = ResourceRequest(gpus=1, cores=2, host_memory_mib=1_000, gpu_memory_mib=2_000)
    found = estimate(
        msgspec.structs.replace(SPEC, resources=asked), tiers(History(), Nearest(), nodes(4), learned)
    )
    assert found.tier == "user"
    assert found.source.startswith("the user asked for all of it; run time: 5,000 iterations")
    assert found.model_version == learned.version


def test_absurd_iterations_stay_within_the_nouns(learned: InUse[Durations]) -> None:
    found = estimate(job(1, iterations=1 << 53), tiers(History(), Nearest(), nodes(4), learned))
    assert found.run_ms == 1 << 53
    gang = estimate(job(1, 256), tiers(History(), Nearest(), nodes(*[1] * 256), learned))
    assert len(gang.source) <= 1_024


def test_the_largest_kind_of_card_answers_and_lost_nodes_do_not(learned: InUse[Durations]) -> None:
    """Most GPUs of the cell are V100, of which nothing is known; then the T4 node leaves."""
    where = nodes(4)
    for number in range(9):
        where.put(node_spec(f"v{number}", 8, model="V100"))
    assert [model for model, _ in where.gpu_nodes(())] == ["V100", "T4"]
    assert estimate(job(1), tiers(History(), Nearest(), where, learned)).run_ms is not None
    where.remove("T4-0")
    where.remove("T4-0")
    assert where.gpu_nodes(("T4",)) == []
    assert estimate(job(1), tiers(History(), Nearest(), where, learned)).run_ms is None


def test_nodes_are_predicted_as_few_kinds() -> None:
    """5,000 nodes, one of which changes its GPUs, one is mixed and one has none."""
    where = nodes(*[8] * 5_000)
    where.put(node_spec("T4-7", 4, model="T4"))
    mixed = node_spec("mixed", 8, model="T4")
    where.put(msgspec.structs.replace(mixed, gpus=(*node_spec("x", 1, model="V100").gpus, *mixed.gpus[1:])))
    where.put(node_spec("bare", 0, model="T4"))
    assert where.gpu_nodes(()) == [("T4", {8: 4_999, 4: 1})]


@pytest.mark.parametrize(
    ("each", "workers", "sizes", "ring"),
    [
        (1, 8, {8: 2}, (8,)),
        (3, 4, {8: 2}, (6, 6)),
        (2, 7, {8: 1, 4: 2}, (8, 4, 2)),
        (4, 3, {4: 2}, ()),
        (16, 1, {8: 4}, ()),
        (1, 1, {}, ()),
    ],
)
def test_the_densest_ring(each: int, workers: int, sizes: dict[int, int], ring: tuple[int, ...]) -> None:
    assert densest(each, workers, sizes) == ring


def moldable(most: int, whole: int, **more: object) -> JobSpec:
    return job(1, most, min_workers=1, batch_size=None, global_batch_size=whole, **more)


def test_a_moldable_job_is_told_the_step_of_each_of_its_shapes(learned: InUse[Durations]) -> None:
    """128 samples an iteration over one to four T4 of one node: the model that learned from other jobs knows
    each, and the truth is in its interval."""
    steps = StepTier(History(), Nearest(), nodes(4))
    steps.use(learned)
    found = steps.options(moldable(4, 128), 1)
    assert [(one.workers, one.nodes, one.gpus_per_node) for one in found] == [(n, 1, n) for n in range(1, 5)]
    for one in found:
        true = true_ms((one.workers,), 128)
        assert one.step_ms == pytest.approx(true, rel=0.15)
        assert one.low_ms < true < one.high_ms


def test_own_runs_of_a_shape_come_before_the_model(learned: InUse[Durations]) -> None:
    """Alice's job ran three times with two workers, slower than others' jobs of this network: of that shape
    her own runs speak."""
    spec, history = moldable(2, 128), History()
    for number, step_ms in enumerate((900.0, 1_000.0, 1_100.0)):
        history.add(key_of(spec.shaped(2)), ran(number, ring=(2,), step_ms=step_ms).measured, "ada")
    steps = StepTier(history, Nearest(), nodes(4))
    assert [(one.workers, one.step_ms, one.low_ms, one.high_ms) for one in steps.options(spec, 1)] == [
        (2, 1_000, 900, 1_100)
    ]
    steps.use(learned)
    one, two = steps.options(spec, 1)
    assert one.step_ms < two.step_ms == 1_000


def test_options_are_bounded_and_only_of_what_the_cell_can_hold(learned: InUse[Durations]) -> None:
    """A range up to 256 gets 16 options with both ends, as far as nodes hold them; a part of a GPU, no GPU
    and no nodes get none."""
    many = moldable(256, 256).offered
    assert (many[0], many[-1], len(many) <= 16) == (1, 256, True)
    assert moldable(8, 256).offered == list(range(1, 9))
    steps = StepTier(History(), Nearest(), nodes(4, 4))
    steps.use(learned)
    assert max(one.workers for one in steps.options(moldable(256, 256), 1)) <= 8
    assert steps.options(moldable(4, 128), 0) == ()
    assert steps.options(moldable(4, 128, model=None), 1) == ()
    shared = msgspec.structs.replace(moldable(4, 128), resources=ResourceRequest(gpu_share_milli=500))
    assert steps.options(shared, 1) == ()
    assert StepTier(History(), Nearest(), nodes()).options(moldable(4, 128), 1) == ()
