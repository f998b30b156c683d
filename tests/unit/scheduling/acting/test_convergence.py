"""Categories of convergence (SpeCon Alg. 1) on losses by hand, and against the algorithm as its text has
it."""

from collections.abc import Sequence
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.acting.convergence import Category, Monitor, NoiseMonitor

INTERVAL_MS = 30_000
P, W, C = Category.PROGRESSING, Category.WATCHING, Category.CONVERGED


def looked(losses: Sequence[float], alpha: float = 0.01) -> list[tuple[Category, bool]]:
    """Category and whether it asks after each look; a loss is reported just after each look."""
    monitor = Monitor(alpha, INTERVAL_MS)
    found = []
    for number, loss in enumerate(losses):
        monitor.observe(loss, number * INTERVAL_MS + 1)
        asks = monitor.look((number + 1) * INTERVAL_MS + 1)
        found.append((monitor.category, asks))
    return found


def test_a_job_that_slows_down_converges_and_asks() -> None:
    """It gains half of its range, then less and less: two small gains make it watched and converged, the
    third lets it ask."""
    found = looked([1.0, 0.5, 0.25, 0.246, 0.243, 0.241, 0.2405, 0.2405])
    assert [category for category, _ in found] == [W, P, P, W, C, C, C, C]
    assert [asks for _, asks in found] == [False, False, False, False, False, True, True, True]


def test_one_that_bounces_stays_where_it_is() -> None:
    """Below the threshold, but more than before: the category stays (line 17)."""
    found = looked([1.0, 0.5, 0.496, 0.4915, 0.4868, 0.4820])
    assert [category for category, _ in found] == [W, P, W, W, W, W]


def test_a_sudden_gain_begins_anew() -> None:
    """The learning rate falls at last: more than the threshold in one interval, and it progresses (lines
    19–22)."""
    found = looked([1.0, 0.5, 0.496, 0.493, 0.2, 0.199])
    assert [category for category, _ in found] == [W, P, W, C, P, W]


def test_a_constant_loss_is_watched_and_never_moves() -> None:
    """Nothing is gained, but nothing falls either: the source's rule needs a growth that falls."""
    monitor = Monitor(0.01, INTERVAL_MS)
    monitor.observe(3.0, 0)
    assert not monitor.look(100 * INTERVAL_MS)
    assert monitor.category is W
    assert monitor.due_ms == 101 * INTERVAL_MS


def test_what_is_no_number_is_not_heard() -> None:
    """A diverged training reports NaN: its category stays, and so does the time of its next look."""
    monitor = Monitor(0.01, INTERVAL_MS)
    for loss in (nan, inf, -inf):
        assert not monitor.observe(loss, 0)
    assert monitor.due_ms is None
    monitor.observe(1.0, 0)
    monitor.observe(nan, 10)
    assert monitor.due_ms == INTERVAL_MS


def test_time_in_which_it_does_not_run_is_left_out() -> None:
    """It was stopped 10 s before a look and ran again an hour later: it is looked at 10 s after that."""
    monitor = Monitor(0.01, INTERVAL_MS)
    monitor.observe(1.0, 0)
    monitor.pause(20_000)
    monitor.pause(21_000)
    assert monitor.due_ms is None
    assert not monitor.look(1_000_000)
    monitor.resume(3_600_000)
    monitor.resume(3_700_000)
    assert monitor.due_ms == 3_610_000


def test_a_rising_loss_is_progress_too() -> None:
    """The source takes the absolute value: whatever changes much is not converged."""
    assert [category for category, _ in looked([1.0, 2.0, 4.0, 8.0])] == [W, P, P, P]


class AsPrinted:
    """Alg. 1 as its text has it, over sets, on growths that were computed beforehand."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.sets: dict[Category, set[str]] = {P: {"c"}, W: set(), C: set()}
        self.before = 1.0

    def look(self, growth: float) -> bool:
        sets, asks = self.sets, False
        if growth < self.before and growth < self.alpha:
            if "c" in sets[P]:
                sets[P].remove("c")
                sets[W].add("c")
            elif "c" in sets[W]:
                sets[W].remove("c")
                sets[C].add("c")
            else:
                asks = True
        elif growth > self.alpha:
            for members in sets.values():
                members.discard("c")
            sets[P].add("c")
        self.before = growth
        return asks

    @property
    def category(self) -> Category:
        [found] = [category for category, members in self.sets.items() if members]
        return found


@given(
    st.lists(st.integers(-1_000, 1_000).map(float), min_size=2, max_size=30),
    st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
)
def test_it_is_the_printed_algorithm(losses: list[float], alpha: float, gaps: list[int]) -> None:
    """Whatever is reported, in whichever intervals: the same categories and requests as the text's, look by
    look."""
    monitor, printed = Monitor(alpha, INTERVAL_MS), AsPrinted(alpha)
    monitor.observe(losses[0], 0)
    low = high = held = last = losses[0]
    now_ms = 0
    for loss, gap in zip(losses[1:], gaps, strict=False):
        for _ in range(gap):
            now_ms += INTERVAL_MS
            span = high - low
            growth = abs(held - last) / span if span else 0.0
            last = held
            asks = monitor.look(now_ms)
            assert asks is printed.look(growth)
            assert monitor.category is printed.category
        monitor.observe(loss, now_ms)
        held, low, high = loss, min(low, loss), max(high, loss)


@given(st.sampled_from([Monitor, NoiseMonitor]), st.integers(1, 50))
def test_looks_that_were_missed_are_made_up_for(kind: type[Monitor], intervals: int) -> None:
    """The migrator was away: it comes to the same category, and to the same next look, as one that looked in
    time; also where the intervals of a noisy curve grow."""
    late, prompt = kind(0.01, INTERVAL_MS), kind(0.01, INTERVAL_MS)
    for monitor in (late, prompt):
        for number, loss in enumerate((1.0, 0.75, 0.501, 0.25)):
            monitor.observe(loss, number * 1_000)
    for number in range(1, intervals + 1):
        prompt.look(number * INTERVAL_MS)
    late.look(intervals * INTERVAL_MS)
    assert (late.category, late.due_ms) == (prompt.category, prompt.due_ms)


def falling(number: int, noise: float, seed: int = 0) -> float:
    """A curve that gains fast, then slowly for ever, with normal noise."""
    rng = np.random.default_rng((seed, number))
    return float(2.0 ** (-number / 3) + 0.5 * 2.0 ** (-number / 60) + noise * rng.standard_normal())


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
def test_a_noisy_curve_converges_by_its_own_noise(noise: float) -> None:
    """The jitter of a small batch is more than α: the source's rule sees progress for ever, ours the same
    convergence as without noise."""
    found: dict[type[Monitor], float] = {}
    for kind in (Monitor, NoiseMonitor):
        monitor, converged = kind(0.01, INTERVAL_MS), 0
        for number in range(400):
            monitor.observe(falling(number, noise), number * INTERVAL_MS // 3)
            converged += number >= 200 and monitor.category is C
        found[kind] = converged / 200
    assert found[NoiseMonitor] > 0.9
    if noise == 0.02:
        assert found[Monitor] < 0.5


def test_a_gain_that_stands_out_of_the_noise_is_progress_again() -> None:
    """The learning rate is lowered after long: the curve falls by a fifth of its range, ten times its
    jitter."""
    monitor = NoiseMonitor(0.01, INTERVAL_MS)
    for number in range(300):
        monitor.observe(falling(number, 0.01), number * INTERVAL_MS // 3)
    assert monitor.category is C
    for number in range(300, 330):
        monitor.observe(falling(number, 0.01) - 0.25 - 0.01 * (number - 300), number * INTERVAL_MS // 3)
        if monitor.category is P:
            return
    raise AssertionError(monitor.category)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40), st.integers(1, 100))
def test_whatever_is_reported_its_interval_is_bounded(losses: list[float], gap: int) -> None:
    """Nonsense, overflow, anything: a look is never further away than eight intervals."""
    monitor = NoiseMonitor(0.01, INTERVAL_MS)
    for number, loss in enumerate(losses):
        now_ms = number * gap * 1_000
        monitor.observe(loss, now_ms)
        monitor.look(now_ms)
        assert monitor.due_ms is None or now_ms < monitor.due_ms <= now_ms + 8 * INTERVAL_MS
        assert monitor.category in Category


@pytest.mark.parametrize("loss", [1e300, -1e300, 1e-300])
def test_losses_of_any_size(loss: float) -> None:
    """Neither overflow nor a division by zero."""
    monitor = Monitor(0.01, INTERVAL_MS)
    monitor.observe(loss, 0)
    monitor.observe(-loss, 1)
    monitor.look(10 * INTERVAL_MS)
    assert monitor.category in Category
