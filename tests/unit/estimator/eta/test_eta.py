"""How long a job still runs, from what is known about it. The curves are our own."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from penstock_services.estimator.core.eta.curves import (
    Curve,
    CurveModel,
    curve,
    first_at,
    learn_curves,
    steps_to,
)
from penstock_services.estimator.core.eta.quantiles import edges, reach, thinned
from penstock_services.estimator.core.eta.remaining import (
    Asked,
    Bounds,
    Learned,
    Step,
    eta,
    learn_runs,
    learn_steps,
    left_by_runs,
    step_time,
)
from tests.papers.estimator.coverage import covered
from tests.support.chance import SURE, rate, sure_hits

STEADY = Step([0.5] * 20)
HALF_WAY = {"middle": (-0.42, 0.12), "high": (0.18, 0.115)}
"""ln of what is foreseen relative to what came, half-way to a target.

Mean and standard deviation of 150 curves, each after others that taught. A model that nobody taught
says 0.32 ± 0.04, with ends that lie a factor of 137 apart.
"""
HELD = rate(144, 150)
"""Of such a curve: that its end lies in the interval."""
CURVES = 40
RUNS_SPREAD, RUNS_HELD = (0.200, 0.0023), (0.901, 0.0059)
"""Of 1,200 jobs with six runs each: mean and standard deviation of 60 draws."""


def falling(power: float, scale: float = 4.0, floor: float = 1.0, points: int = 500, seed: int = 0) -> Curve:
    """A loss that falls by a power law, with a wobble of 1 %."""
    steps = np.arange(1, points + 1, dtype=np.float64)
    wobble = np.random.default_rng(seed).normal(0, 0.01, points)
    return Curve(steps, floor + scale * steps**-power + wobble)


def cut(whole: Curve, points: int) -> Curve:
    return Curve(whole.steps[:points], whole.values[:points])


def taught(first: int = 0) -> CurveModel:
    """By twelve curves, of seeds from that one on."""
    return learn_curves(
        [
            ("net", falling(power, scale, seed=seed))
            for seed, (power, scale) in enumerate(
                ((power, scale) for power in (0.3, 0.5, 0.7, 0.9) for scale in (2.0, 4.0, 8.0)), first
            )
        ]
    )


def half_way(model: CurveModel, seed: int, turn: float = 1.0) -> tuple[float, float, float]:
    """(middle, low, high) of what is left of a curve, relative to what came."""
    whole = falling(0.6, 5.0, seed=seed)
    end = first_at(whole, 1.15)
    assert end is not None
    half = cut(whole, end // 2)
    found = steps_to(Curve(half.steps, turn * half.values), turn * 1.15, end // 2, model, 0.9, "net")
    assert found is not None
    middle, low, high = (each / (end - end // 2) for each in found)
    return middle, low, high


class TestEta:
    def test_iterations_asked_for(self) -> None:
        """1,000 iterations asked for, 400 done at half a second each, 20 s to save at the end."""
        found = eta(Asked(400, STEADY, total=1_000, after_s=20), Learned())
        assert found is not None
        assert found.left_s.middle == pytest.approx(320)
        assert found.left_s.low < 320 < found.left_s.high < 450
        assert (found.steps, found.source) == (Bounds(600, 600, 600), "iterations asked for")

    def test_before_the_first_step_the_model_shows(self) -> None:
        """Just placed: nothing was measured, the throughput model says 0.5 s give or take 20 %."""
        predicted = Step(log_s=math.log(0.5), spread=0.2)
        found = eta(Asked(0, predicted, total=100, after_s=30), Learned())
        assert found is not None
        assert found.left_s.middle == pytest.approx(80)
        measured = eta(Asked(0, predicted._replace(measured_s=[0.5] * 50), total=100, after_s=30), Learned())
        assert measured is not None
        assert measured.left_s.high - measured.left_s.low < found.left_s.high - found.left_s.low

    def test_a_migrated_job_is_reported_by_its_new_speed(self) -> None:
        """The model thought 0.5 s; twenty windows on the new node show 1 s: the windows win."""
        found = step_time(Step([1.0] * 20, log_s=math.log(0.5), spread=0.2), Learned())
        assert found is not None
        assert 0.95 < found.middle <= 1.0

    def test_the_surest_source_speaks(self) -> None:
        """Finished runs of the same job tell within a few percent; its young loss curve does not."""
        asked = Asked(
            100, STEADY, past_totals=[990, 1_000, 1_010, 1_005], curve=cut(falling(0.5), 100), target=1.2
        )
        by_runs = eta(asked, Learned())
        assert by_runs is not None
        assert by_runs.source == "4 finished runs of the same job"
        assert by_runs.steps.middle == pytest.approx(901, rel=0.02)
        by_curve = eta(asked._replace(past_totals=()), Learned())
        assert by_curve is not None
        assert by_curve.source == "loss curve of 100 points"

    def test_a_target_may_end_it_before_the_iterations_asked_for(self) -> None:
        """At most 300 iterations, less if the loss falls to 1.2: never more than 200 are left after 100."""
        asked = Asked(100, STEADY, total=300, curve=cut(falling(0.5), 100), target=1.2)
        found = eta(asked, Learned(taught()))
        assert found is not None
        assert found.steps.low <= found.steps.middle <= found.steps.high <= 200
        blind = eta(asked._replace(curve=None), Learned())
        assert blind is not None
        assert blind.steps == Bounds(200, 0, 200)

    def test_nothing_known_is_no_answer(self) -> None:
        """No iterations, no run, no curve: the CLI says that it does not know, and not a number."""
        assert eta(Asked(10, STEADY), Learned()) is None
        assert eta(Asked(10, Step(), total=100), Learned()) is None

    def test_a_done_job_has_nothing_left_but_saving(self) -> None:
        """The count passed what was asked for while the exit is still on its way."""
        found = eta(Asked(1_001, STEADY, total=1_000, after_s=5), Learned())
        assert found is not None
        assert found.left_s == Bounds(5, 5, 5)

    def test_broken_measurements_are_passed_over(self) -> None:
        """A clock jumped back in one window, another holds no step."""
        found = step_time(Step([0.5, math.nan, -1.0, 0.0, 0.5, math.inf]), Learned())
        assert found is not None
        assert found.middle == pytest.approx(0.5)


class TestRuns:
    def test_a_job_that_outlives_its_runs_moves_them(self) -> None:
        """Half of the runs ended by now: what is left is told from those that ran longer."""
        totals = [800, 900, 1_000, 1_100, 1_200]
        young, old = left_by_runs(totals, 0, Learned()), left_by_runs(totals, 1_000, Learned())
        assert young is not None
        assert old is not None
        assert young.middle == pytest.approx(990, rel=0.02)
        assert 0 < old.middle < 300

    def test_far_beyond_all_runs_they_say_nothing(self) -> None:
        """Ten times as long as any run before: the owner changed the job, the history is of another one."""
        assert left_by_runs([100, 110, 105], 1_000, Learned()) is None
        assert left_by_runs([0, -5, math.nan], 10, Learned()) is None

    def test_the_intervals_hold_what_other_jobs_taught(self) -> None:
        """Runs of 1,200 jobs scatter by 20 %; intervals learned from 800 hold nine in ten of the rest."""
        rng = np.random.default_rng(3)
        jobs = [(10 ** rng.uniform(2, 5) * np.exp(rng.normal(0, 0.2, 6))).tolist() for _ in range(1_200)]
        spread, errors = learn_runs(jobs[:800])
        mean, off = RUNS_SPREAD
        assert spread == pytest.approx(mean, abs=SURE * off)
        predicted, came = [], []
        for job in jobs[800:]:
            for place, total in enumerate(job):
                bounds = left_by_runs(
                    [*job[:place], *job[place + 1 :]], 0, Learned(run_spread=spread, run_errors=errors)
                )
                assert bounds is not None
                predicted.append(bounds)
                came.append(total)
        mean, off = RUNS_HELD
        assert covered(predicted, came) == pytest.approx(mean, abs=SURE * off)


class TestCurves:
    @pytest.mark.parametrize("turn", [1.0, -1.0])
    def test_a_power_law_is_followed_to_its_target(self, turn: float) -> None:
        """A loss falls, or an accuracy rises, by a law like those of past runs: half-way, the end is
        foreseen."""
        middle, low, high = half_way(taught(), 99, turn)
        assert low < 1
        mean, off = HALF_WAY["middle"]
        assert math.log(middle) == pytest.approx(mean, abs=SURE * off)
        mean, off = HALF_WAY["high"]
        assert math.log(high) == pytest.approx(mean, abs=SURE * off)

    @pytest.mark.slow
    def test_intervals_of_many_curves_hold_their_ends(self) -> None:
        """Each curve after twelve others of its own."""
        found = [half_way(taught(1_000 + 20 * number), 99 - number) for number in range(CURVES)]
        assert sum(low < 1 < high for _, low, high in found) >= sure_hits(HELD, CURVES)

    def test_a_foreign_kind_is_reported_more_widely(self) -> None:
        """Curves of two kinds fall by different laws; of a third kind nothing is known."""
        model = learn_curves(
            [("a", falling(power, seed=1)) for power in np.linspace(0.4, 0.6, 8)]
            + [("b", falling(power, 9.0, 0.1, seed=2)) for power in np.linspace(1.0, 1.4, 8)]
        )
        seen = cut(falling(0.5, seed=7), 60)
        own, foreign = (steps_to(seen, 1.25, 60, model, 0.9, kind) for kind in ("a", "c"))
        assert own is not None
        assert foreign is not None
        assert foreign[2] - foreign[1] > own[2] - own[1]

    def test_what_a_kind_always_does_is_learned(self) -> None:
        """One network's schedule drops the learning rate at step 300: its loss falls then, and no power law
        knows."""

        def scheduled(seed: int) -> Curve:
            smooth = falling(0.3, 3.0, seed=seed)
            return Curve(smooth.steps, smooth.values - 0.8 / (1 + np.exp((300 - smooth.steps) / 4)))

        others = [("net", falling(power, seed=seed)) for seed, power in enumerate(np.linspace(0.3, 0.9, 8))]
        model = learn_curves([*others, *(("scheduled", scheduled(seed)) for seed in range(10, 16))])
        seen = cut(scheduled(99), 150)
        own, foreign = (steps_to(seen, 1.1, 150, model, 0.9, kind) for kind in ("scheduled", "net"))
        assert own is not None
        assert foreign is not None
        # The quotient is 0.26 ± 0.065 (40 draws).
        assert abs(own[0] - 150) < 0.7 * abs(foreign[0] - 150)
        assert own[1] < 150 < own[2]

    def test_a_reached_target_leaves_nothing(self) -> None:
        assert steps_to(falling(0.6), 2.0, 500, CurveModel(), 0.9) == (0.0, 0.0, 0.0)

    def test_too_few_points_predict_nothing(self) -> None:
        assert steps_to(cut(falling(0.6), 4), 1.2, 4, CurveModel(), 0.9) is None
        assert learn_curves([("net", cut(falling(0.6), 8))]) == CurveModel()

    @pytest.mark.parametrize(
        "values",
        [
            lambda step: 3.0,  # nothing is learned
            lambda step: 3.0 + 0.01 * step,  # it diverges
            lambda step: 3.0 if step % 2 else 5.0,  # it oscillates
            lambda step: 1e90 / step,
        ],
    )
    def test_a_sick_curve_is_answered_widely_and_in_numbers(self, values: Callable[[int], float]) -> None:
        """The learning rate was too high: the answer says at least that it takes long."""
        seen = curve(range(1, 101), [values(step) for step in range(1, 101)])
        found = steps_to(seen, -1.0, 100, taught(), 0.9, "net")
        assert found is not None
        middle, low, high = found
        assert 0 <= low <= middle <= high < math.inf

    def test_points_come_in_any_order_and_some_are_none(self) -> None:
        """Telemetry of two attempts overlaps: of one step the last word counts; no NaN, no overflow."""
        seen = curve([3, 1, 2, 2, 4, 0, 5], [3.0, 1.0, 9.0, 2.0, math.nan, 7.0, 1e200])
        assert (seen.steps.tolist(), seen.values.tolist()) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


class TestErrors:
    def test_quantiles_of_held_out_errors(self) -> None:
        errors = thinned([*range(-50, 51), math.nan, math.inf])
        assert len(errors) == 101
        assert edges(errors, 0.9, 1.0) == (-46, 46)
        assert reach(thinned(range(100)), 0.9) == 90
        assert edges((), 0.9, 2.0) == pytest.approx((-3.29, 3.29), abs=0.01)

    def test_many_errors_are_thinned_at_even_ranks(self) -> None:
        found = thinned(range(50_000))
        assert len(found) == 10_000
        assert (found[0], found[-1]) == (0, 49_999)
        assert found[5_000] == pytest.approx(25_000, rel=0.001)

    def test_drifting_runs_widen_the_step(self) -> None:
        """Past runs slowed down by half towards their end: the interval of the next one reaches that far
        up."""
        drifting = [np.linspace(1.0, 2.0, 50).tolist() for _ in range(10)]
        found = step_time(STEADY, Learned(step_errors=learn_steps(drifting)))
        steady = step_time(STEADY, Learned(step_errors=learn_steps([[1.0] * 50] * 10)))
        assert found is not None
        assert steady is not None
        assert found.high > 0.7
        assert steady.high == pytest.approx(0.5, rel=0.02)


class TestLiars:
    """Finished runs of somebody who lies teach as well; what they do to others is bounded."""

    def test_steps_of_any_length_widen_an_interval_within_bounds(self) -> None:
        wild = [[1e-6, 1e4] * 10, [1e4, 1e-6] * 10] * 40
        found = step_time(STEADY, Learned(step_errors=learn_steps(wild)))
        assert found is not None
        assert found.middle == pytest.approx(0.5)
        assert 0.5 / 5 < found.low
        assert found.high < 0.5 * 5

    def test_totals_of_any_size_widen_an_interval_within_bounds(self) -> None:
        spread, errors = learn_runs([[1.0, 2.0**53]] * 100)
        found = left_by_runs([1_000.0] * 10, 0.0, Learned(run_spread=spread, run_errors=errors))
        assert found is not None
        assert found.middle == pytest.approx(1_000)
        assert 1_000 / 20 < found.low
        assert found.high < 1_000 * 20

    @pytest.mark.parametrize("end", [1e-9, 1e9])
    def test_curves_of_any_shape_move_what_is_left_within_bounds(self, end: float) -> None:
        """Whole curves that jump at their very first or their very last point."""
        steps = np.geomspace(1, 2.0**53, 64)
        jumps = np.where(np.arange(64) < 63, 5.0 + np.arange(64) * 1e-9, end)
        model = learn_curves([("resnet", Curve(steps, jumps))] * 32)
        seen = falling(0.5)
        predicted = steps_to(seen, 1.05, 500, model, 0.9, "resnet")
        assert predicted is not None
        assert 500 * 0.01 <= predicted[0] <= 500 * 150
