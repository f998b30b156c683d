"""From a cell's own finished runs to a model that answers: which runs teach, which model is let in, what it
says."""

from functools import cache

import numpy as np
import pytest

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock_services.estimator.core.learning.saved import BadModel
from penstock_services.estimator.core.model_lifecycle import Due, Trained
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import (
    Allocation,
    Card,
    EstimateSummary,
    FinishedRun,
    JobInfo,
)
from penstock_services.estimator.core.resource_model import model as learned
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resource_model.training import (
    MIN_NEW,
    MIN_TEACHING,
    RESOURCES,
    table,
    teaching,
)
from penstock_services.estimator.core.resources.estimate import estimate
from tests.support.cluster.driver import node_spec

T4, V100 = Card("T4", 15_360), Card("V100", 16_384)
PER_SAMPLE = {"resnet50": 90.0, "bert": 220.0, "vgg16": 120.0}


def finished(
    seq: int,
    model: str | None,
    batch: int,
    card: Card = T4,
    *,
    used_mib: float | None = None,
    estimate: EstimateSummary | None = None,
    owner: str = "",
    share: int = 1_000,
) -> FinishedRun:
    noise = np.random.default_rng(seq)
    memory = 800 + PER_SAMPLE.get(model or "", 100.0) * batch if used_mib is None else used_mib
    return FinishedRun(
        seq,
        f"job-{seq}",
        JobInfo(b"k", owner or f"user-{seq % 5}", model, batch, 1, 0, ()),
        Allocation(1, share, 2, card),
        estimate,
        Run(
            ended_ms=seq * 1_000,
            seq=seq,
            run_ms=60_000,
            gpus=1,
            gpu_memory_mib=memory * noise.uniform(0.98, 1.02),
            gpu_utilisation_percent=noise.uniform(68, 72),
        ),
        "",
    )


def node(node_id: str, card: Card) -> NodeSpec:
    return node_spec(node_id, 4, model=card.model, memory_mib=card.memory_mib)


def nodes(cards: dict[str, Card]) -> NodeCapacity:
    found = NodeCapacity()
    for node_id, card in cards.items():
        found.put(node(node_id, card))
    return found


def cell(count: int, first: int = 1) -> list[FinishedRun]:
    """A month of a small cell: three networks, four batch sizes, two kinds of cards."""
    return [
        finished(seq, list(PER_SAMPLE)[seq % 3], (8, 16, 32, 48)[seq % 4], (T4, V100)[seq % 2])
        for seq in range(first, first + count)
    ]


def spec(model: str | None = "resnet50", batch: int = 24, **more: object) -> JobSpec:
    return JobSpec(command=("python", "new.py"), model=model, batch_size=batch, **more)


@cache
def trained_once() -> Trained | None:
    """Three tests look at one model."""
    return RESOURCES.train(cell(96), None)


def test_a_batch_size_never_run_is_reported_from_the_others() -> None:
    """Resnet ran with 8, 16, 32 and 48; 24 needs what lies between, and the promise holds for nine runs in
    ten."""
    trained = trained_once()
    assert trained is not None
    assert trained.promoted
    assert (trained.runs, trained.first_run_ms, trained.last_run_ms) == (96, 1_000, 96_000)
    assert trained.metrics["gpu_memory_mib_error"] < 0.05
    tier = ModelTier(nodes({"n1": T4}))
    assert estimate(spec(), (tier,)).tier == "default"
    tier.use(RESOURCES.read(trained.body, trained.sha256))
    found = estimate(spec(), (tier,))
    assert (found.tier, found.model_version) == ("model", trained.version)
    assert 800 + 90 * 24 < found.worker.gpu_memory_mib < 1.2 * (800 + 90 * 24)
    assert found.worker.gpu_utilisation_percent == pytest.approx(70, abs=3)
    assert "9 of 10 such runs between" in found.source
    assert found.confidence > 0.5


def test_the_same_runs_give_the_same_model() -> None:
    """Replay and two machines must agree on the version."""
    assert RESOURCES.train(cell(40), None) == RESOURCES.train(cell(40), None)


def test_a_model_says_nothing_of_what_it_never_saw() -> None:
    """A network without a run, a job without a name or without GPUs: the next tier answers."""
    trained = trained_once()
    assert trained is not None
    tier = ModelTier(nodes({"n1": T4}))
    tier.use(RESOURCES.read(trained.body, trained.sha256))
    assert tier.guess(spec("whisper"), b"") is None
    assert tier.guess(spec(None), b"") is None
    assert tier.guess(spec(resources=ResourceRequest(gpus=0)), b"") is None
    assert tier.guess(spec(gpu_models=("H100",)), b"") is None, "no such card is in the cell"
    assert ModelTier(nodes({})).guess(spec(), b"") is None


def test_a_card_that_would_do_is_not_ruled_out() -> None:
    """A cell of small and large cards: the promise is for the small one where the job fits it."""
    trained = trained_once()
    assert trained is not None
    tier = ModelTier(nodes({"n1": V100, "n2": T4}))
    tier.use(RESOURCES.read(trained.body, trained.sha256))
    found = tier.guess(spec(), b"")
    assert found is not None
    assert found.gpu_memory_mib is not None
    assert found.gpu_memory_mib < T4.memory_mib


def test_a_model_that_is_worse_on_recent_runs_is_not_promoted() -> None:
    """A broken exporter mixed up batch sizes for a week: what is learned from it does worse than what answers
    now."""
    good = trained_once()
    assert good is not None
    rng = np.random.default_rng(1)
    mixed = [
        finished(
            run.seq,
            run.info.model,
            run.info.batch_size or 1,
            run.allocation.card,
            used_mib=float(rng.uniform(900, 14_000)),
        )
        for run in cell(64, 200)
    ]
    worse = RESOURCES.train([*mixed, *cell(16, 300)], RESOURCES.read(good.body, good.sha256).model)
    assert worse is not None
    assert not worse.promoted
    assert worse.metrics["error"] > worse.metrics["before_error"]
    better = RESOURCES.train(cell(120), RESOURCES.read(good.body, good.sha256).model)
    assert better is not None
    assert better.promoted


def test_too_few_or_useless_runs_make_no_model() -> None:
    """The first days of a cell; jobs without a name; jobs on shares, whose utilisation is not theirs."""
    assert RESOURCES.train(cell(MIN_TEACHING - 1), None) is None
    assert RESOURCES.train([finished(seq, None, 8) for seq in range(100)], None) is None
    assert RESOURCES.train([finished(seq, "bert", 8, share=500) for seq in range(100)], None) is None
    stored = teaching([finished(1, "bert", 8), finished(2, "bert", 8, used_mib=20_000.0)])
    assert [run.seq for run in stored] == [1], "more memory than the card has"


def test_a_tampered_model_is_refused() -> None:
    """Somebody edits the table of models, or a disk flips a bit."""
    trained = trained_once()
    assert trained is not None
    other = RESOURCES.train(cell(44), None)
    assert other is not None
    damaged = bytearray(trained.body)
    damaged[-1] ^= 1
    for body in (bytes(damaged), trained.body[:-8], b"", b"x" * 200, other.body):
        with pytest.raises(BadModel):
            RESOURCES.read(body, trained.sha256)


def test_a_model_is_due_by_runs_or_by_drift_never_by_the_clock() -> None:
    """Fifty new runs, or a library update after which every other promise is broken."""
    due = Due(RESOURCES)
    due.seen(cell(MIN_NEW - 1))
    assert due.reason == ""
    due.seen(cell(1))
    assert due.reason == "50 new runs since a model of 0"
    due.trained(1_000)
    due.seen(cell(100))
    assert due.reason == "", "a fifth more is due"
    promised = EstimateSummary("model", "m", 0.8, None, 2, 0, 2_000, 70.0)
    due.seen([finished(seq, "bert", 8, used_mib=2_500, estimate=promised) for seq in range(13)])
    assert due.reason.startswith("drift: 13 of 13")
    due.trained(1_100)
    assert due.reason == ""


def test_jobs_that_arrive_together_are_predicted_what_each_is_reported_alone() -> None:
    """A sweep of submissions in one read: other batches, GPUs and allowed cards, one of a network never
    seen."""
    trained = trained_once()
    assert trained is not None
    cards = nodes({"n1": V100, "n2": T4, "n3": T4})
    together, alone = ModelTier(cards), ModelTier(cards)
    jobs = [
        *(spec(name, batch) for name in PER_SAMPLE for batch in range(4, 40, 3)),
        spec("whisper"),
        spec(gpu_models=("V100",)),
        spec(resources=ResourceRequest(gpus=4)),
        spec(resources=ResourceRequest(gpus=0)),
    ]
    together.prepare(jobs)
    assert together.guess(jobs[0], b"") is None, "there is no model yet"
    for tier in (together, alone):
        tier.use(RESOURCES.read(trained.body, trained.sha256))
    together.prepare(jobs)
    for job in jobs:
        assert together.guess(job, b"") == alone.guess(job, b"")
    assert sum(alone.guess(job, b"") is not None for job in jobs) == len(jobs) - 2


def test_a_card_that_joins_later_counts_from_the_next_estimate_on() -> None:
    """The cell begins with T4s; a node with a larger card joins, one job may only run there."""
    trained = trained_once()
    assert trained is not None
    cards = nodes({"n1": T4})
    tier = ModelTier(cards)
    tier.use(RESOURCES.read(trained.body, trained.sha256))
    job = spec(gpu_models=("V100",))
    assert tier.guess(job, b"") is None
    cards.put(node("n2", V100))
    found = tier.guess(job, b"")
    assert found is not None
    assert "on V100" in found.source


def test_the_model_that_answers_takes_its_weights_from_the_one_that_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where cells are many: the newest runs change what is told, not how likeness is measured."""
    monkeypatch.setattr(learned, "MAX_SEARCHED", 20)
    columns = table([finished(seq, "bert", seq % 48 + 1) for seq in range(80)])
    older = learned.train(columns.pick(np.arange(60)))
    final = learned.train(columns, like=older)
    for name, one in final.labels.items():
        assert one.covariance is older.labels[name].covariance
    monkeypatch.setattr(learned, "MAX_SEARCHED", 400)
    assert learned.train(columns, like=older).labels["gpu_memory_mib"].covariance is not (
        older.labels["gpu_memory_mib"].covariance
    ), "few cells: nothing is saved by it"
