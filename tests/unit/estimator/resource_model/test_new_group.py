"""The first of its kind: what an estimate answers about a GPU model, a network or a kind of training that
never ran here."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.cli.following.event_text import first_of_kind
from penstock.cli.queries import explain
from penstock.cli.queries.eta import shown
from penstock.ledger.state.job.remaining import Remaining
from penstock.model.inputs.estimates import Bounds
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written
from penstock.screen import console
from penstock_services.estimator.core.eta.curves import CurveModel, curve, learn_curves
from penstock_services.estimator.core.eta.remaining import (
    Asked,
    Learned,
    Step,
    eta,
    left_by_runs,
    reach_of_new_kind,
)
from penstock_services.estimator.core.learning.new_group import MIN_ERRORS, MIN_GROUPS, ends_of_new_group
from penstock_services.estimator.core.resource_model.features import NEW_GENERATION, NEW_GPU
from penstock_services.estimator.core.resource_model.measurements import MEMORY, Runs
from penstock_services.estimator.core.resource_model.model import (
    GPU_CONFIDENCE,
    UNTESTED_GENERATION,
    UNTESTED_GPU,
    train,
)
from penstock_services.estimator.core.resources.estimate import Guess, estimate
from penstock_services.gateway.core.forecasts.eta import remaining
from tests.support.chance import sure_hits
from tests.support.trainings import measured_runs as cluster


def test_a_new_group_is_held_where_all_errors_together_hold_it_not() -> None:
    """GPU models differ by 1, runs on one model by 0.2: 95 % of a new model's runs are to be below the end,
    in 99 of 100 models."""
    rng = np.random.default_rng(0)
    held, held_pooled = [], []
    for _ in range(300):
        groups = [rng.normal(rng.normal(), 0.2, 40) for _ in range(13)]
        *known, new = groups
        ends = ends_of_new_group(known, 0.95, 0.99)
        assert ends is not None
        held.append((new <= ends[1]).mean() >= 0.95)
        held_pooled.append((new <= np.quantile(np.concatenate(known), 0.95)).mean() >= 0.95)
    assert sum(held) >= sure_hits(0.99, len(held))
    assert np.mean(held_pooled) < np.mean(held)


def test_too_few_groups_show_no_end() -> None:
    groups = [np.arange(MIN_ERRORS) / 10] * (MIN_GROUPS - 1)
    assert ends_of_new_group(groups, 0.95, 0.99) is None
    assert ends_of_new_group([*groups, np.zeros(MIN_ERRORS - 1)], 0.95, 0.99) is None
    below, above = ends_of_new_group([*groups, np.zeros(MIN_ERRORS)], 0.95, 0.99) or (0.0, 0.0)
    assert below == 0.0
    assert above > 0.4, "a group whose errors are all above has no end below"


def test_groups_that_have_much_in_common_count_as_fewer() -> None:
    """Four GPU models of two generations are two witnesses of what a third generation does; those of one are
    none."""
    groups = [np.arange(MIN_ERRORS) + place for place in range(4)]
    alone, together = (ends_of_new_group(groups, 0.95, 0.95, count) for count in (None, 2))
    assert alone is not None
    assert together is not None
    assert together[1] > 1.5 * alone[1]
    assert ends_of_new_group(groups, 0.95, 0.95, 1) is None


def test_the_promise_on_a_gpu_model_never_seen_is_the_wider() -> None:
    """Four GPU models whose libraries take different shares of the card: the fifth may be as far off as they
    are from each other."""
    runs = cluster.runs()
    factor = {gpu: 0.7 + 0.1 * place for place, gpu in enumerate(cluster.GPUS)}
    used = runs.labels[MEMORY] * [factor[task.gpu] for task in runs.tasks]
    label = train(Runs(runs.tasks, {MEMORY: used})).labels[MEMORY]
    assert label.new_gpu.low >= label.seen_gpu.low
    assert label.new_gpu.high > label.seen_gpu.high
    two = [task.gpu in cluster.GPUS[:2] for task in runs.tasks]
    few = train(Runs(runs.tasks, {MEMORY: used}).pick(np.array(two))).labels[MEMORY]
    assert few.new_gpu.high >= UNTESTED_GPU, "two models show nothing of a third"
    assert 0.95 < GPU_CONFIDENCE < 1


def test_the_promise_on_a_generation_never_seen_is_wider_still() -> None:
    """A cell of Volta, Turing and one Ampere card asks about another Turing card, a Hopper, and one that has
    no facts."""
    model = train(cluster.runs())
    [known, *_] = cluster.tasks()
    cards = ("2080Ti", "RTX5000", "H100", "Maker 1")
    asked = model.features.of([replace(known, gpu=gpu, card_mib=known.card_mib) for gpu in cards])
    assert asked.gpu.tolist() == [model.features.gpus["2080Ti"], NEW_GPU, NEW_GENERATION, NEW_GENERATION]
    label = model.labels[MEMORY]
    assert label.new_generation.high >= label.new_gpu.high > 0
    turing = train(cluster.runs(gpus=("2080Ti", "RTX6000"))).labels[MEMORY]
    assert turing.new_generation.high >= UNTESTED_GENERATION, "one generation shows nothing of another"


class _Only:
    """A tier that gives one answer."""

    def __init__(self, guess: Guess | None) -> None:
        self._guess = guess

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        return self._guess


SPEC = JobSpec(owner="ada", command=("train",), model="bert")
ON_NEW_GPU = Guess("model", 0.5, "the model", gpu_memory_mib=5_000, first_of_kind=("gpu_model",))


def test_an_estimate_names_what_is_new_and_shows_it() -> None:
    """A network that never ran, then a card that never ran it; what the user asked for is no guess."""
    new = estimate(SPEC, ())
    assert new.first_of_kind == ("network",)
    assert "first of its kind: no run of this network" in new.source
    assert first_of_kind(as_written(new)) == "first of its kind: network"
    card = estimate(SPEC, (_Only(ON_NEW_GPU),))
    assert card.first_of_kind == ("gpu_model",)
    assert first_of_kind(as_written(card)) == "first of its kind: GPU model"
    asked = replace_asked(SPEC, gpu_memory_mib=4_000)
    assert estimate(asked, (_Only(ON_NEW_GPU),)).first_of_kind == ()
    own = Guess("history", 0.7, "own runs", gpu_memory_mib=4_000)
    assert estimate(SPEC, (_Only(own), _Only(ON_NEW_GPU))).first_of_kind == ()
    assert "first_of_kind" not in as_written(estimate(SPEC, (_Only(own),)))


def replace_asked(spec: JobSpec, **asked: int) -> JobSpec:
    return JobSpec(
        owner=spec.owner, command=spec.command, model=spec.model, resources=ResourceRequest(**asked)
    )


def _curves(kind: str, power: float) -> list[tuple[str, object]]:
    steps = np.arange(1.0, 301.0)
    return [(kind, curve(steps.tolist(), (1 + scale * steps**-power).tolist())) for scale in (2.0, 4.0, 8.0)]


@pytest.fixture(scope="module")
def learned() -> CurveModel:
    kinds = zip(("bert", "gpt", "resnet", "vgg"), (0.3, 0.5, 0.8, 1.2), strict=True)
    return learn_curves([one for kind, power in kinds for one in _curves(kind, power)])


def test_the_time_left_of_a_kind_never_seen_is_wider_and_named(learned: CurveModel) -> None:
    """Four networks fall by powers of their own; of a fifth only its first hundred steps are known."""
    assert learned.foreign_ends is not None
    seen = curve(range(1, 101), [1 + 4 * step**-0.5 for step in range(1, 101)])
    asked = Asked(100, Step([1.0] * 20), curve=seen, target=1.25, kind="gpt")
    known, new = eta(asked, Learned(learned)), eta(asked._replace(kind="whisper"), Learned(learned))
    assert known is not None
    assert new is not None
    assert (known.first_of_kind, new.first_of_kind) == (False, True)
    assert new.steps.low <= known.steps.low
    assert new.steps.high > known.steps.high
    nothing = eta(asked._replace(kind="whisper"), Learned())
    assert nothing is not None
    assert not nothing.first_of_kind, "no kind has taught: the interval is one set by hand"


def test_runs_of_a_kind_never_seen_scatter_as_whole_kinds_do() -> None:
    """Of three networks runs differ by 2, 5 and 20 %: those of a fourth may differ by more than the usual."""
    rng = np.random.default_rng(1)
    kinds = {
        kind: [(1_000 * np.exp(rng.normal(0, spread, 5))).tolist() for _ in range(8)]
        for kind, spread in (("bert", 0.02), ("gpt", 0.05), ("resnet", 0.2))
    }
    far = reach_of_new_kind(kinds)
    assert far is not None
    learned = Learned(run_spread=0.1, run_kinds=tuple(kinds), foreign_reach=far)
    known = left_by_runs([1_000, 1_050, 950], 0, learned, kind="gpt")
    new = left_by_runs([1_000, 1_050, 950], 0, learned, kind="whisper")
    assert known is not None
    assert new is not None
    assert new.low < known.low < known.high < new.high
    assert reach_of_new_kind(dict(list(kinds.items())[:2])) is None


def test_why_and_eta_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A user asks why his job has so much memory, and how long it takes: both answers name what is new."""
    answer = {
        "job_id": "train-1",
        "status": "running",
        "seq": 7,
        "record_ms": 1_000,
        "now_ms": 2_000,
        "text": "It runs.",
    }
    explain.show(answer, first_of_kind(as_written(estimate(SPEC, ()))))
    assert "Its estimate: first of its kind: network" in capsys.readouterr().out
    explain.show(answer, first_of_kind({"tier": "history"}))
    assert "kind" not in capsys.readouterr().out
    bounds = Bounds(middle=60_000.0, low=30_000.0, high=90_000.0)
    eta = Remaining(
        attempt=1,
        at_ms=1_000,
        done=10,
        left_ms=bounds,
        steps=bounds,
        step_ms=bounds,
        level=0.9,
        source="loss curve of 12 points; first of its kind: no finished run of its network",
        first_of_kind=True,
    )
    job = {"job_id": "train-1", "status": "running", "attempt": 1, "running_ms": 500, "name": "train"}
    found = remaining(job, None, eta, 2_000)
    assert found["first_of_kind"] is True
    console().print(shown(found, job), soft_wrap=True)
    assert "first of its kind: no finished run of its network" in capsys.readouterr().out
