"""Convergence categories of training jobs: progressing, watching, converged. Source: SpeCon §V-A, Alg. 1.

A job's loss is looked at once per categorisation interval of its running time. What it changed by since the last look is its *growth*.
Nothing but losses that were reported before the look counts, so a category never changes afterwards.
"""

from enum import StrEnum
from math import isfinite, sqrt, ulp

FIRST_GROWTH = 1.0
"""Before the first look: nothing was evaluated, and a whole range of loss was gained at the first value."""


class Category(StrEnum):
    """Of a running job. Source: SpeCon §V-A."""

    PROGRESSING = "progressing"
    WATCHING = "watching"
    CONVERGED = "converged"


class Monitor:
    """Alg. 1 for one job: `alpha`, the threshold, a share of the range of losses seen so far, > 0; `interval_ms` between two looks, > 0.

    The printed lines 10–12 repeat lines 7–9; the text has what is meant: from watching to converged.

    Departures: losses are normalised by the range seen until the look, where the source leaves open by what; a loss that is not finite is
    ignored; time in which the job does not run is left out (`pause`, `resume`); each look leads to at most one change, as in the source, and
    looks that have been missed are made up for, since no loss came between them.
    """

    __slots__ = (
        "_alpha", "_growth", "_high", "_interval_ms", "_last", "_loss", "_low", "_next_ms", "_rest_ms", "category",
    )  # fmt: skip

    def __init__(self, alpha: float, interval_ms: int) -> None:
        self._alpha = alpha
        self._interval_ms = interval_ms
        self.category = Category.PROGRESSING
        self._loss: float | None = None
        """The latest; None: none was reported."""
        self._last = 0.0
        """That of the latest look, or the first."""
        self._low = self._high = 0.0
        self._growth = FIRST_GROWTH
        self._next_ms: int | None = None
        """When it is looked at next; None: it does not run, or has reported nothing."""
        self._rest_ms = interval_ms
        """While it does not run: what is left until then."""

    @property
    def due_ms(self) -> int | None:
        """When it is to be looked at; None: not before something else happens."""
        return self._next_ms

    def hear(self, loss: float, now_ms: int) -> bool:
        """The job reports its loss; looks that were due before are made first. Whether one of them asks, as `look`."""
        if not isfinite(loss):
            return False
        asks = self.look(now_ms)
        if self._loss is None:
            self._last = self._low = self._high = loss
            self._next_ms = now_ms + self._interval_ms
        self._loss = loss
        self._low, self._high = min(self._low, loss), max(self._high, loss)
        return asks

    def look(self, now_ms: int) -> bool:
        """All looks that are due at `now_ms`. True: the job has converged and grows still less, so that it may give up its place (lines 13–16)."""
        asks = False
        while self._next_ms is not None and self._next_ms <= now_ms:
            self._next_ms += self.interval_ms()
            before = self._growth
            asks = self._look() or (asks and self.category is Category.CONVERGED)
            if self._growth == before == 0.0:  # nothing has come since: all looks until now end the same way
                missed = max(0, (now_ms - self._next_ms) // self.interval_ms())
                self._next_ms += missed * self.interval_ms()
        return asks

    def threshold(self, span: float) -> float:
        """α: growth below it, a share of the range `span`, converges."""
        return self._alpha

    def interval_ms(self) -> int:
        """From a look to the next."""
        return self._interval_ms

    def pause(self, now_ms: int) -> None:
        """The job does not run any more."""
        if self._next_ms is not None:
            self._rest_ms, self._next_ms = max(0, self._next_ms - now_ms), None

    def resume(self, now_ms: int) -> None:
        """It runs again."""
        if self._loss is not None and self._next_ms is None:
            self._next_ms = now_ms + self._rest_ms

    def _look(self) -> bool:
        """Lines 4–22; whether it asks for a reallocation."""
        assert self._loss is not None, "it is due only after a report"
        span = self._high - self._low
        change = abs(self._loss - self._last)
        growth = change / span if span > ulp(max(abs(self._high), abs(self._low))) else 0.0
        falls, self._growth, self._last = growth < self._growth, growth, self._loss
        threshold = self.threshold(span)
        if growth > threshold:
            self.category = Category.PROGRESSING
        elif growth < threshold and falls:
            if self.category is Category.CONVERGED:
                return True
            self.category = Category.WATCHING if self.category is Category.PROGRESSING else Category.CONVERGED
        return False


SIGMAS = 3.0  # standard deviations of a difference by which it stands out from noise
WEIGHT = 0.04  # of the newest three losses in the noise: it rests on some fifty, so that a calm stretch does not lower it
LONGEST = 8  # intervals of the source between two looks at a noisy curve


class NoiseMonitor(Monitor):
    """As `Monitor`, with α and interval from the noise of the loss itself. Ours: the source has one α for all models, and on a noisy curve the jitter alone is more.

    Noise is what a loss is off the middle of its neighbours. Growth converges where it is within `SIGMAS` standard deviations of a difference of two losses, and never
    less than α for each interval; the interval doubles while growth is lost in noise, up to `LONGEST`, so that a slow gain adds up to more than it, and is that of the source again after one that stands out.
    """

    __slots__ = ("_before", "_factor", "_two_before", "_variance")

    def __init__(self, alpha: float, interval_ms: int) -> None:
        super().__init__(alpha, interval_ms)
        self._before: float | None = None
        self._two_before: float | None = None
        self._variance: float | None = None
        """Of one loss around its curve."""
        self._factor = 1

    def hear(self, loss: float, now_ms: int) -> bool:
        """As of `Monitor`."""
        asks = super().hear(loss, now_ms)
        if isfinite(loss):
            if self._before is not None and self._two_before is not None:
                off = self._before - (self._two_before + loss) / 2
                square = off * off / 1.5  # the variance of such a difference is 3/2 that of a loss
                known = self._variance
                self._variance = square if known is None else known + WEIGHT * (square - known)
            self._two_before, self._before = self._before, loss
        return asks

    def threshold(self, span: float) -> float:
        """As of `Monitor`."""
        if not self._variance or span <= 0:
            return self._alpha
        return max(self._factor * self._alpha, SIGMAS * sqrt(2 * self._variance) / span)

    def _look(self) -> bool:
        threshold = self.threshold(self._high - self._low)
        asks = super()._look()
        if self._variance:
            self._factor = 1 if self._growth > threshold else min(LONGEST, 2 * self._factor)
        return asks

    def interval_ms(self) -> int:
        """As of `Monitor`."""
        return self._factor * self._interval_ms
