"""A model of step times from finished runs: what it says, who may move it how far, what is refused."""

import math

import pytest

from penstock_services.estimator.core.learning.limits import (
    BEYOND_USUAL,
    CURVES,
    TABLES_OF_ONE,
    TAUGHT_BY_ONE,
    TEACHING_OF_ONE,
)
from penstock_services.estimator.core.learning.saved import BadModel
from penstock_services.estimator.core.records.runs import FinishedRun, Steps
from penstock_services.estimator.core.step_time.training import (
    MIN_TEACHING,
    STEPS,
    Durations,
    StepAnswer,
    StepQuestion,
    answer,
    evaluate,
)
from penstock_services.estimator.core.step_time.training_set import (
    OWN_QUOTA,
    OWNERS_APART,
    SHARED,
    SHARED_QUOTA,
    cell_of,
    limited_per_owner,
    name_of,
    sample_of,
    samples_of,
    tables_of,
    teaching_of,
    training_set,
)
from tests.unit.estimator.reports import month, ran, true_ms

NET = name_of(SHARED, "resnet50", "T4")


def one_answer(durations: Durations, asked: StepQuestion) -> StepAnswer | None:
    return answer(durations, [asked])[asked]


@pytest.fixture(scope="module")
def taught() -> list[FinishedRun]:
    """A month of three people who train one network."""
    return month(120)


def test_a_placement_that_nobody_ran_is_reported_from_those_that_were(taught: list[FinishedRun]) -> None:
    """Nobody used two nodes with one GPU each, nor a batch of 48."""
    trained = STEPS.train(taught, None)
    assert trained is not None
    model = trained
    assert model.version == f"steps-{model.sha256[:12]}"
    assert (model.runs, model.promoted) == (120, True)
    assert model.metrics["step_error"] < 0.06, "the runs scatter by 0.03"
    assert model.metrics["step_told"] == 1
    learned = STEPS.read(model.body, model.sha256)
    predicted = one_answer(learned.model, StepQuestion("new", "resnet50", "T4", cell_of((1, 1), 48)))
    assert predicted is not None
    assert math.exp(predicted.log_s) * 1_000 == pytest.approx(true_ms((1, 1), 48), rel=0.25)
    assert not predicted.own
    assert one_answer(learned.model, StepQuestion("ada", "resnet50", "V100", cell_of((1,), 48))) is None
    own = one_answer(learned.model, StepQuestion("ada", "resnet50", "T4", cell_of((4,), 64)))
    assert own is not None
    assert own.own, "her own runs doubt less than everybody's"


def test_the_same_runs_give_the_same_model(taught: list[FinishedRun]) -> None:
    """Killed after the training and before the answer: the next one comes to the same version."""
    one, other = (STEPS.train(taught[:40], None) for _ in range(2))
    assert one == other


def test_a_worse_model_is_not_promoted(taught: list[FinishedRun]) -> None:
    """A machine was broken for a day, and its step times are noise: the model of last week stays."""
    good = STEPS.train(taught, None)
    assert good is not None
    wild = [
        run._replace(
            measured=run.measured._replace(step_ms=run.measured.step_ms * (30 if run.seq % 2 else 1))
        )
        for run in taught[:90]
    ]
    worse = STEPS.train([*wild, *taught[90:]], STEPS.read(good.body, good.sha256).model)
    assert worse is not None
    assert not worse.promoted
    assert worse.metrics["step_error"] > worse.metrics["before_step_error"]


def test_too_few_runs_make_no_model() -> None:
    """Among them runs without batch size, without network, on parts of a GPU, on unlike cards, with absurd
    steps."""
    runs = [ran(seq) for seq in range(MIN_TEACHING - 1)]
    bare = runs[0]
    allocation, info = bare.allocation, bare.info
    runs += [
        bare._replace(steps=None),
        bare._replace(info=info._replace(batch_size=None)),
        bare._replace(info=info._replace(model=None)),
        bare._replace(steps=Steps()),
        bare._replace(allocation=allocation._replace(card=allocation.card._replace(model=""))),
        bare._replace(rejected="run_ms: wrong"),
        *(bare._replace(measured=bare.measured._replace(step_ms=wrong)) for wrong in (0, -1, 1e-9, 1e12)),
        *(bare._replace(measured=bare.measured._replace(step_ms=wrong)) for wrong in (math.nan, math.inf)),
    ]
    assert len(samples_of(runs)) == MIN_TEACHING - 1
    assert STEPS.train(runs, None) is None
    assert STEPS.train([], None) is None


def test_a_touched_model_is_refused(taught: list[FinishedRun]) -> None:
    """A byte was changed; or another whole model lies where this one was written."""
    trained, other = STEPS.train(taught[:30], None), STEPS.train(taught[30:60], None)
    assert trained is not None
    assert other is not None
    with pytest.raises(BadModel, match="cut short or changed"):
        STEPS.read(trained.body[:-3] + b"000", trained.sha256)
    with pytest.raises(BadModel, match="is another one"):
        STEPS.read(other.body, trained.sha256)


class TestOneOwner:
    """Mallory runs a thousand jobs and lies about each."""

    def test_he_moves_no_cell_that_two_others_measured(self) -> None:
        """The median is between them, whatever he says and however often."""
        honest = [ran(1, "ada", step_ms=100), ran(2, "bob", step_ms=120)]
        lies = [ran(seq, "mallory", step_ms=80_000_000) for seq in range(3, 1_000)]
        assert math.exp(tables_of(samples_of([*honest, *lies]))[NET].log_s[0]) == pytest.approx(0.12)

    def test_a_cell_that_he_disputes_is_shared_no_more(self) -> None:
        """Who of the two lies cannot be told; the other's own runs still answer him."""
        found = tables_of(samples_of([ran(1, "ada", step_ms=100), ran(2, "mallory", step_ms=80_000_000)]))
        assert NET not in found
        assert name_of("ada", "resnet50", "T4") in found
        near = tables_of(samples_of([ran(1, "ada", step_ms=100), ran(2, "bob", step_ms=150)]))
        assert math.exp(near[NET].log_s[0]) == pytest.approx(math.sqrt(0.1 * 0.15))

    def test_what_he_alone_measured_is_believed_within_bounds(self) -> None:
        """What is usual among three is not his to say; of two, both may be right and neither is believed."""
        honest = [ran(1, "ada", step_ms=100), ran(2, "bob", ring=(2,), step_ms=90)]
        for lie, believed in ((80_000_000, False), (0.01, False), (100 * BEYOND_USUAL * 0.9, True)):
            found = tables_of(samples_of([*honest, ran(3, "mallory", ring=(8,), step_ms=lie)]))[NET]
            assert {cell.placement for cell in found.cells} == {(1,), (2,), *([(8,)] if believed else [])}
        assert NET not in tables_of(samples_of([honest[0], ran(3, "mallory", ring=(8,), step_ms=80_000_000)]))
        alone = tables_of(samples_of([ran(3, "mallory", ring=(8,), step_ms=80_000_000)]))
        assert NET in alone, "while nobody knows better"
        far = tables_of(samples_of([ran(1, "ada", step_ms=1), ran(2, "ada", ring=(8,), step_ms=60_000)]))
        assert len(far[NET].cells) == 2, "and she may have what she likes"

    @pytest.mark.parametrize("factor", [1e-3, 0.2, 5, 1e3])
    def test_what_others_are_predicted_moves_within_bounds(self, factor: float) -> None:
        """Ada and Bob ran four kinds of placements; he runs those and others, five hundred times, and all are
        a lie."""
        honest, rings = month(60, ("ada", "bob")), ((1,), (2,), (4,), (4, 4), (2, 2), (8,), (8, 8), (1, 1))
        lies = [
            ran(
                100 + number,
                "mallory",
                ring=ring,
                batch=2 ** (4 + number % 5),
                step_ms=true_ms(ring, 2 ** (4 + number % 5)) * factor,
            )
            for number, ring in enumerate(rings * 60)
        ]
        asked = [
            StepQuestion("new", "resnet50", "T4", cell_of(ring, batch))
            for ring in rings
            for batch in (24, 96)
        ]
        before, after = (
            answer(STEPS.read(trained.body, trained.sha256).model, asked)
            for trained in (STEPS.train(runs, None) for runs in (honest, honest + lies))
            if trained is not None
        )
        for one in asked:
            predicted, moved = before[one], after[one]
            assert predicted is not None
            assert moved is not None
            assert abs(moved.log_s - predicted.log_s) <= math.log(2 * BEYOND_USUAL)

    def test_he_takes_a_bounded_part_of_the_tables(self) -> None:
        """He names a new network in each of 2,000 jobs; Ada's, a year old, still has its room."""
        old = [ran(seq, "ada", batch=2**seq) for seq in range(1, 9)]
        flood = [ran(seq, "mallory", f"net-{seq}", batch=seq) for seq in range(10, 2_010)]
        found = tables_of(samples_of([*old, *flood]))
        assert name_of("ada", "resnet50", "T4") in found
        assert NET in found
        assert (
            sum("net-" in name for name in found) <= (SHARED_QUOTA.tables + OWN_QUOTA.tables) / TABLES_OF_ONE
        )
        cells = sum(len(table.cells) for name, table in found.items() if "net-" in name)
        assert cells <= (SHARED_QUOTA.cells + OWN_QUOTA.cells) / TABLES_OF_ONE
        teaching = teaching_of(found, samples_of([*old, *flood]))
        assert NET in teaching
        assert sum("net-" in name for name in teaching) <= TEACHING_OF_ONE

    def test_he_teaches_a_bounded_part_of_what_all_share(self) -> None:
        curve = tuple((float(step), 5.0 / step) for step in range(1, 30))
        runs = [ran(1, "ada", curve=curve, command="a")]
        runs += [ran(seq, "mallory", curve=curve, command=f"{seq}") for seq in range(2, 200)]
        found = training_set(runs)
        assert len(found.curves) == len(found.totals) == len(found.windows) == TAUGHT_BY_ONE + 1
        assert len(limited_per_owner([(str(n), n) for n in range(1_000)], CURVES)) == CURVES


def test_how_far_owners_are_apart_is_learned_within_bounds() -> None:
    """Two who run the same image agree; two who do not are apart; whoever lies counts as far as owners may be
    apart."""
    for factor, low, high in ((1.0, 0.05, 0.15), (1.5, 0.2, 0.35), (1e4, 0.45, 0.5)):
        runs = [ran(seq, "ada", batch=seq, step_ms=100) for seq in range(1, 100)]
        runs += [ran(100 + seq, "bob", batch=seq, step_ms=100 * factor) for seq in range(1, 100)]
        assert low <= training_set(runs).apart <= high
    assert training_set([]).apart == OWNERS_APART


def test_a_table_holds_its_most_recently_measured_cells() -> None:
    """A sweep over 300 batch sizes."""
    runs = [ran(seq, batch=seq) for seq in range(1, 301)]
    found = tables_of(samples_of(runs))
    for whose, most in (("ada", OWN_QUOTA.each), (SHARED, SHARED_QUOTA.each)):
        cells = found[name_of(whose, "resnet50", "T4")].cells
        assert {cell.local_batch for cell in cells} == set(range(301 - most, 301))


def test_the_batch_is_shared_by_the_gpus() -> None:
    sample = sample_of(ran(1, ring=(4, 2, 2), batch=64))
    assert sample is not None
    assert sample.cell == cell_of((2, 2, 4), 64), "the same ring, wherever it begins"
    assert sample.cell.local_batch == 8
    gang = ran(1, ring=(4, 4), batch=64)
    two = sample_of(gang._replace(info=gang.info._replace(workers=2)))
    assert two is not None
    assert (two.cell.local_batch, two.batch) == (16, 128), "a job file tells the batch of one worker"


def test_nothing_to_judge_by_gives_no_figures(taught: list[FinishedRun]) -> None:
    blank = STEPS.fit(taught[:20], None)  # type: ignore[union-attr]
    assert evaluate(blank, []) == {}
    stranger = sample_of(ran(1, "eve", "vgg16"))
    assert stranger is not None
    assert evaluate(blank, [ran(1, "eve", "vgg16")]) == {"step_told": 0}
