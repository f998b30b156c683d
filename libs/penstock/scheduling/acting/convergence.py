"""Convergence categories of training jobs: progressing, watching, converged. Source: SpeCon §V-A, Alg. 1.

A job's loss is evaluated once per categorisation interval of its running time. Its change since the last
evaluation is its *growth*. Only losses that were reported before the evaluation count, so a category never
changes afterwards.
"""

from collections import deque
from enum import StrEnum
from math import isfinite, sqrt, ulp
from typing import NamedTuple


class Category(StrEnum):
    """Of a running job. Source: SpeCon §V-A."""

    PROGRESSING = "progressing"
    WATCHING = "watching"
    CONVERGED = "converged"


MAX_WINDOWS = 4  # from progressing to converged takes two evaluations, a request one more


class LossWindow(NamedTuple):
    """One evaluation: the loss before and at its end, its growth, the threshold for that, and the category
    after it."""

    began_ms: int
    ended_ms: int
    before: float
    loss: float
    growth: float
    threshold: float
    category: Category


class Monitor:
    """Alg. 1 for one job: `alpha`, the threshold, a share of the range of losses so far, > 0; `interval_ms`
    between two evaluations, > 0.

    The printed lines 10–12 repeat lines 7–9; the paper's text gives the intended transition: from watching to
    converged.

    Departures: losses are normalised by their range until the evaluation, where the source does not name the
    divisor; a loss that is not finite is ignored; time in which the job does not run is left out (`pause`,
    `resume`). Each evaluation leads to at most one change, as in the source, and missed evaluations are made
    up for, since no loss arrived between them.
    """

    __slots__ = (
        "_alpha",
        "_growth",
        "_high",
        "_interval_ms",
        "_last",
        "_looked_ms",
        "_loss",
        "_low",
        "_next_ms",
        "_rest_ms",
        "category",
        "windows",
    )

    def __init__(self, alpha: float, interval_ms: int) -> None:
        self._alpha = alpha
        self._interval_ms = interval_ms
        self.category = Category.PROGRESSING
        self.windows: deque[LossWindow] = deque(maxlen=MAX_WINDOWS)
        """The latest evaluations."""
        self._looked_ms = 0
        """Time of the latest evaluation, or of the first loss."""
        self._loss: float | None = None
        """The latest loss; None: none was reported."""
        self._last = 0.0
        """The loss at the latest evaluation, or the first loss."""
        self._low = self._high = 0.0
        self._growth = 1.0  # before the first evaluation: the whole range of the loss
        self._next_ms: int | None = None
        """Time of the next evaluation; None: the job does not run, or has reported nothing."""
        self._rest_ms = interval_ms
        """Time left until the next evaluation, while the job does not run."""

    @property
    def due_ms(self) -> int | None:
        """Time of the next evaluation; None: not before another event."""
        return self._next_ms

    def observe(self, loss: float, now_ms: int) -> bool:
        """Takes a reported loss, after evaluations that were due before. Returns whether one of them asks for
        a reallocation, as `look`."""
        if not isfinite(loss):
            return False
        asks = self.look(now_ms)
        if self._loss is None:
            self._last = self._low = self._high = loss
            self._looked_ms = now_ms
            self._next_ms = now_ms + self._interval_ms
        self._loss = loss
        self._low, self._high = min(self._low, loss), max(self._high, loss)
        return asks

    def look(self, now_ms: int) -> bool:
        """Makes all evaluations due at `now_ms`. True: the job has converged and its growth still falls, so
        that it may give up its place (lines 13–16)."""
        asks = False
        while self._next_ms is not None and self._next_ms <= now_ms:
            at_ms, interval_ms, before = self._next_ms, self.interval_ms(), self._growth
            self._next_ms += interval_ms
            asks = self._look(at_ms) or (asks and self.category is Category.CONVERGED)
            if self._growth == before == 0.0 and self.interval_ms() == interval_ms:
                # no loss since: all evaluations until now end the same way
                missed = max(0, (now_ms - self._next_ms) // interval_ms)
                self._next_ms += missed * interval_ms
        return asks

    def threshold(self, span: float) -> float:
        """α: growth below this share of the range `span` counts as converging."""
        return self._alpha

    def interval_ms(self) -> int:
        """Time between two evaluations."""
        return self._interval_ms

    def pause(self, now_ms: int) -> None:
        """The job stops running: the interval is suspended."""
        if self._next_ms is not None:
            self._rest_ms, self._next_ms = max(0, self._next_ms - now_ms), None

    def resume(self, now_ms: int) -> None:
        """The job runs again: the interval continues."""
        if self._loss is not None and self._next_ms is None:
            self._next_ms = now_ms + self._rest_ms

    def _look(self, at_ms: int) -> bool:
        """Lines 4–22; returns whether it asks for a reallocation."""
        assert self._loss is not None, "judged only after a report of its loss"
        span, before = self._high - self._low, self._last
        change = abs(self._loss - before)
        growth = change / span if span > ulp(max(abs(self._high), abs(self._low))) else 0.0
        falls, self._growth, self._last = growth < self._growth, growth, self._loss
        threshold, asks = self.threshold(span), False
        if growth > threshold:
            self.category = Category.PROGRESSING
        elif growth < threshold and falls:
            asks = self.category is Category.CONVERGED
            progressing = self.category is Category.PROGRESSING
            self.category = Category.WATCHING if progressing else Category.CONVERGED
        window = LossWindow(self._looked_ms, at_ms, before, self._loss, growth, threshold, self.category)
        self.windows.append(window)
        self._looked_ms = at_ms
        return asks


SIGMAS = 3.0  # standard deviations of a difference from which it is significant
# of the newest three losses in the noise: an average over some fifty, so that a calm stretch does not lower
# it
WEIGHT = 0.04
LONGEST = 8  # intervals of the source between two evaluations of a noisy curve


class NoiseMonitor(Monitor):
    """As `Monitor`, with α and interval from the noise of the loss itself. Our addition: the source has one α
    for all models, and on a noisy curve the jitter alone exceeds it.

    Noise is a loss's deviation from the mean of its two neighbours. The threshold is `SIGMAS` standard
    deviations of a difference of two losses, at least α for each interval. The interval doubles while growth
    is below the threshold, up to `LONGEST`, so that a slow gain adds up to more than the noise; after a
    significant growth it is the source's again.
    """

    __slots__ = ("_before", "_factor", "_two_before", "_variance")

    def __init__(self, alpha: float, interval_ms: int) -> None:
        super().__init__(alpha, interval_ms)
        self._before: float | None = None
        self._two_before: float | None = None
        self._variance: float | None = None
        """Variance of one loss around its curve."""
        self._factor = 1

    def observe(self, loss: float, now_ms: int) -> bool:
        """See `Monitor`."""
        asks = super().observe(loss, now_ms)
        if isfinite(loss):
            if self._before is not None and self._two_before is not None:
                off = self._before - (self._two_before + loss) / 2
                square = off * off / 1.5  # the variance of such a difference is 3/2 that of a loss
                known = self._variance
                self._variance = square if known is None else known + WEIGHT * (square - known)
            self._two_before, self._before = self._before, loss
        return asks

    def threshold(self, span: float) -> float:
        """See `Monitor`."""
        if not self._variance or span <= 0:
            return self._alpha
        return max(self._factor * self._alpha, SIGMAS * sqrt(2 * self._variance) / span)

    def _look(self, at_ms: int) -> bool:
        threshold = self.threshold(self._high - self._low)
        asks = super()._look(at_ms)
        if self._variance:
            self._factor = 1 if self._growth > threshold else min(LONGEST, 2 * self._factor)
        return asks

    def interval_ms(self) -> int:
        """See `Monitor`."""
        return self._factor * self._interval_ms
