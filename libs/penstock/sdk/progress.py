"""Progress reports of a training script: `progress(done, total, loss)`, once per iteration.

Most calls cost a comparison. A line is written at the first one, then whenever the number of iterations since
the first has grown by a tenth, half a second apart at least, at iteration `total`, and when the script ends.
Ideal: every iteration is reported; departure: a job of 10 million of them writes 170 lines, each with the
mean since the line before.

Two reports go by time and not by iterations. The loss, to detect whether it still falls: about every `LOSS_S`
seconds a line has the loss alone. The step time, to detect whether other jobs slow the training down: the
mean of about every `WINDOW_S` seconds is compared with the last one written, and written if it differs, or if
the script has another number of cores since, from which the number of cores that it needs is found. It
excludes waits for turns and time spent on a checkpoint. In a group a window whose waits for turns are another
part of it than before is a line of progress of its own.
"""

import atexit
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from penstock.sdk.checkpoint import SAVER
from penstock.sdk.cores import cores, look
from penstock.sdk.reporter.lines import leads, write_line
from penstock.sdk.sharing.turns import Waits
from penstock.sdk.stages import on_long_wait, waits, yield_turn

GROWTH_TENTHS = 11  # a line when the iterations since the first one are 1.1 times those of the last line
PROFILE_ITERATIONS = "PENSTOCK_PROFILE_ITERATIONS"
"""Variable of a profiling run: the number of iterations after which it ends."""
LEAST_S = 0.5  # between lines; a shorter window measures the step time badly
# between looks at the clock, for steady step times; if steps take four times as long, still within a window
LOOK_S = 0.5
LOSS_S = 5.0  # between losses
WINDOW_S = 2.0  # of a step time; as long as the kernel's windows of pressure stall information
CHANGED = 0.05  # relative change of the step time at which it is written again
SPEED_CHANGED = 0.1  # of the part of a window without waits, at which its waits are written
SPEED_REPEAT_S = 10.0  # between such lines of a job that waits: its group is judged by a minute
REPEAT_S = 30.0  # between lines with an unchanged step time, since a line or its event may be lost
MAX_DONE = 1 << 53
MAX_LOSS = 1e100  # bound of an event's field; NaN, infinities and more are left out
MAX_STEP_MS = 1e9
Number = TypeVar("Number", int, float)
UNFIT = (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError)
"""Errors that values which are not numbers raise, tensors included."""


class Meter:
    """Decides when to write a line. `clock`: monotonic seconds; `write`: takes a line, returns whether it was
    written; `waits`: waits for turns so far; `count`: number of cores that the script may use now."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], bool] = write_line,
        waits: Callable[[], Waits] = waits,
        count: Callable[[], int] = cores,
    ) -> None:
        self._clock = clock
        self._write = write
        self._waits = waits
        self._count = count
        self._cores = 0
        """Number of cores when the window of the step time began; 0: none has begun."""
        self._waited = Waits()
        self._off = False
        self._begun = 0  # iterations before the first one reported
        self._due = 0
        self._reported = 0
        self._reported_at = 0.0
        self._tried_at = -LEAST_S
        self._seen = 0
        self._total: Any = None
        self._look_due = 0
        """Iteration at which the clock is read next; 0: not before the first line."""
        self._looked, self._looked_at = 0, 0.0
        self._loss_at = 0.0
        self._window, self._window_at, self._window_waited = 0, 0.0, Waits()
        """Iteration, time and waits so far at which the window of the step time began."""
        self._speed, self._speed_at = 1.0, 0.0
        """Part of the last written window without waits, and when it was written."""
        self._step_ms, self._step_ms_at = 0.0, 0.0
        """Step time of the last window that was written, and when it was; 0: none was."""

    def step(self, done: int, total: int | None, loss: SupportsFloat | SupportsIndex | None) -> None:
        """As `progress`."""
        if self._off:
            return
        try:
            if done > self._seen:
                self._seen, self._total = done, total
            if done < self._due and done < self._look_due and done != total:
                return
            now = self._clock()
            due = done == total or (done >= self._due and now - self._tried_at >= LEAST_S)
            if done > self._reported and due:
                self._report(int(done), total, loss, now, (self._reported, self._reported_at, self._waited))
            if done >= self._look_due > 0:
                self._look(int(done), loss, now)
        except UNFIT:
            return

    def finish(self) -> None:
        """At the script's end: reports the last iteration, unless it was reported."""
        with suppress(*UNFIT):
            if not self._off and self._seen > self._reported:
                since = self._reported, self._reported_at, self._waited
                self._report(int(self._seen), self._total, None, self._clock(), since)

    def _report(self, done: int, total: Any, loss: Any, now: float, since: tuple[int, float, Waits]) -> None:
        """`since`: iteration, time and waits at which the line's window began."""
        self._tried_at = now
        begun, begun_at, before = since
        if done > MAX_DONE or not leads():
            self._off = True
            return
        line: dict[str, float] = {"done": done}
        planned = _number(total, int)
        if planned is not None and done <= planned <= MAX_DONE:
            line["total"] = planned
        if self._reported:
            step_ms = 1_000 * (now - begun_at) / (done - begun)
            if 0 <= step_ms <= MAX_STEP_MS:
                line |= {"steps": done - begun, "step_ms": round(step_ms, 6)}
        waited = self._waits()
        if self._reported and waited != before:
            waited_ms = 1_000 * (waited.seconds - before.seconds) / (done - begun)
            line |= {"waited_ms": round(waited_ms, 6), "missed_turns": waited.missed - before.missed}
        reached = _number(loss, float)
        if reached is not None and abs(reached) <= MAX_LOSS:
            line["loss"] = reached
        if not self._write(json.dumps({"steps": line}, separators=(",", ":"))):
            return
        if not self._reported:
            self._begun = done - 1
            atexit.register(self.finish)
            self._begin_window(done, now)
            self._look_again(done, now)
        self._reported, self._reported_at, self._waited, self._loss_at = done, now, waited, now
        self._due = self._begun + (GROWTH_TENTHS * (done - self._begun) + 9) // 10

    def interrupted(self) -> None:
        """Restarts the window of the step time, after work that is not part of an iteration."""
        if self._look_due:
            self._begin_window(self._seen, self._clock())

    def _look(self, done: int, loss: Any, now: float) -> None:
        """Writes the step time and the loss, if due, between two lines of progress."""
        if self._count() != self._cores:  # a window with both numbers of cores measures neither
            self._begin_window(done, now)
            self._step_ms = 0.0
        elif now - self._window_at >= WINDOW_S:
            self._report_window(done, now)
        if now - self._loss_at >= LOSS_S:
            self._loss_at = now
            reached = _number(loss, float)
            if reached is not None and abs(reached) <= MAX_LOSS:
                self._write(json.dumps({"loss": {"done": done, "loss": reached}}, separators=(",", ":")))
        self._look_again(done, now)

    def _report_window(self, done: int, now: float) -> None:
        steps, passed_s = done - self._window, now - self._window_at
        waited_s = self._waits().seconds - self._window_waited.seconds
        self._report_waits(done, now, waited_s / passed_s)
        self._begin_window(done, now)
        step_ms = round(1_000 * (passed_s - waited_s) / steps, 6) if steps > 0 else 0.0
        if not 0 < step_ms <= MAX_STEP_MS:
            return
        same = abs(step_ms - self._step_ms) < CHANGED * self._step_ms
        if same and now - self._step_ms_at < REPEAT_S:
            return
        line = {"window": {"steps": steps, "step_ms": step_ms, "cores": self._cores}}
        if self._write(json.dumps(line, separators=(",", ":"))):
            self._step_ms, self._step_ms_at = step_ms, now

    def _report_waits(self, done: int, now: float, waited: float) -> None:
        """Writes the window as a line of progress, where another part of it is `waited` than of the last one;
        an unchanged part is repeated while the job waits, since a line or its event may be lost."""
        speed = 1.0 - waited
        same = abs(speed - self._speed) < SPEED_CHANGED * self._speed
        if same and (not waited or now - self._speed_at < SPEED_REPEAT_S):
            return
        if done > self._reported:
            self._report(done, self._total, None, now, (self._window, self._window_at, self._window_waited))
            self._speed, self._speed_at = speed, now

    def _begin_window(self, done: int, now: float) -> None:
        self._window, self._window_at, self._window_waited = done, now, self._waits()
        self._cores = self._count()

    def look_soon(self) -> None:
        """Looks at the clock at the next iteration, which has taken longer than those before."""
        self._look_due = min(self._look_due, 1)

    def _look_again(self, done: int, now: float) -> None:
        """Sets the next look at the clock after as many iterations as recently took `LOOK_S`;
        others cost a comparison."""
        passed_s, steps = now - self._looked_at, done - self._looked
        ahead = steps if passed_s <= 0 else int(LOOK_S * steps / passed_s)
        self._look_due = done + max(1, min(ahead, 2 * steps))
        self._looked, self._looked_at = done, now


def _number(value: Any, kind: type[Number]) -> Number | None:
    """The value as a number; None: it is not one. A tensor with a gradient is detached first, to avoid
    PyTorch's warning."""
    if value is None:
        return None
    try:
        detach = getattr(value, "detach", None)
        return kind(value if detach is None else detach())
    except UNFIT:
        return None


class Limit:
    """Ends a profiling run. `most`: its iterations; 0: it is not a profiling run."""

    def __init__(self, most: int) -> None:
        self._left = most

    @classmethod
    def of(cls, text: str) -> "Limit":
        """The limit in the variable's text; a text that is not a number means no limit."""
        return cls(int(text) if text.isdecimal() else 0)

    def step(self) -> None:
        """Counts one more iteration. Raises `SystemExit` at the last one, in every worker of a gang."""
        if self._left:
            self._left -= 1
            if not self._left:
                raise SystemExit(0)


_METER = Meter()
on_long_wait(_METER.look_soon)
_LIMIT = Limit.of(os.environ.get(PROFILE_ITERATIONS, ""))


def progress(done: int, total: int | None = None, loss: SupportsFloat | SupportsIndex | None = None) -> None:
    """Reports that `done` iterations are complete, of `total` if that is known. Call it after each one.

    `done` counts since the job began: a script that resumes goes on counting from its checkpoint. A count
    that is not higher than before is not reported. `loss` may be any argument of `float`; it is read only
    when a line is written, so that a loss on a GPU is not waited for in every iteration. Under `penstock
    profile` it ends the script after the measured iterations.

    Costs less than a microsecond, and some ten where a line is written. Never blocks, never fails, except by
    callbacks of `on_cores`; does nothing outside of Penstock, and in all workers of a gang but rank 0. A
    requested checkpoint (`penstock.sdk.checkpoint`) is saved here.
    """
    look()
    _METER.step(done, total, loss)
    if SAVER.asked:
        yield_turn()
        SAVER.boundary(done)
        _METER.interrupted()
    _LIMIT.step()
