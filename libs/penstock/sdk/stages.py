"""Stage profile of a training script, where an iteration spends its time: `iteration()` and `with stage("storage")`.

    for batch in range(batches):
        iteration()
        with stage("storage"):
            samples = read(batch)
        with stage("gpu"):
            step(samples)

Once 20 whole iterations are over, one line reports the share of time of each stage; another one only if that has
changed. Source: Muri §5 (tens of iterations make a stable profile). Ideal: usage is sampled from counters, piece by
piece; departure: the script marks it, so a stage is either used or not, and all pieces of a stage are reported as their sum,
which is all that a profile is made of.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from penstock.sdk.cores import look
from penstock.sdk.lines import leads, write_line

StageName = Literal["storage", "cpu", "gpu", "network"]
STAGES: tuple[StageName, ...] = ("storage", "cpu", "gpu", "network")
IDLE = len(STAGES)
ITERATIONS = 20  # of one profile, at least
LEAST_S = 0.5  # of one profile: what is shorter is mostly noise
WARM_UP = 3  # iterations that are not counted: what is loaded or compiled once is no part of the others
CHANGED = 0.2  # of an iteration's time, as the sum of the stages' differences
MAX_LINES = 16  # a script whose stages change all the time is not profiled for ever
MAX_WINDOW_MS = 86_400_000.0  # what an event takes


class _StageMark(AbstractContextManager[None]):
    """One per stage; keeps nothing of its own, so that it may be entered anywhere and again."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: "Recorder", index: int) -> None:
        self._recorder, self._index = recorder, index

    def __enter__(self) -> None:
        self._recorder.enter(self._index)

    def __exit__(self, *_: object) -> None:
        self._recorder.leave()


_NO_MARK = nullcontext()


class Recorder:
    """Adds up the time of each stage. `clock`: monotonic seconds; `write`: takes a line, returns whether it was written."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, write: Callable[[str], bool] = write_line
    ) -> None:
        self._clock = clock
        self._write = write
        self._marks = {name: _StageMark(self, index) for index, name in enumerate(STAGES)}
        self._asked = False
        self._thread: int | None = None
        """That iterates, and whose marks count; None: nothing is recorded."""
        self._now = IDLE
        self._around: list[int] = []
        self._since = 0.0
        self._sums = [0.0] * (IDLE + 1)
        self._count = -WARM_UP
        self._reported: list[float] | None = None
        self._lines = 0
        self._differed = False

    def iteration(self) -> None:
        """As the function of that name."""
        if self._thread != threading.get_ident():
            if not self._asked:
                self._begin()
            return
        self._switch(self._now)
        self._count += 1
        if self._count == 0:
            self._sums = [0.0] * (IDLE + 1)
        elif self._count >= ITERATIONS and sum(self._sums) >= LEAST_S:
            self._report_profile([1_000 * part for part in self._sums], self._count)
            self._sums, self._count = [0.0] * (IDLE + 1), 0

    def stage(self, name: StageName) -> AbstractContextManager[None]:
        """As the function of that name."""
        if self._thread is None:
            return _NO_MARK
        return self._marks.get(name, _NO_MARK)

    def enter(self, index: int) -> None:
        """From now on it is this stage."""
        if self._thread == threading.get_ident():
            self._around.append(self._now)
            self._switch(index)

    def leave(self) -> None:
        """From now on it is again what it was around this stage."""
        if self._around and self._thread == threading.get_ident():
            self._switch(self._around.pop())

    def _begin(self) -> None:
        self._asked = True
        if leads():
            self._thread = threading.get_ident()
            self._since = self._clock()

    def _switch(self, index: int) -> None:
        now = self._clock()
        self._sums[self._now] += now - self._since
        self._since, self._now = now, index

    def _report_profile(self, sums_ms: list[float], count: int) -> None:
        """Reports the first profile, then one that two windows in a row make another: a checkpoint is no change."""
        if not any(sums_ms[:IDLE]) or sum(sums_ms) > MAX_WINDOW_MS:
            return
        profile = [part / count for part in sums_ms]
        if self._reported is not None:
            apart = sum(abs(one - other) for one, other in zip(profile, self._reported, strict=True))
            before, self._differed = self._differed, apart > CHANGED * sum(self._reported)
            if not (before and self._differed):
                return
        if self._write(_line(sums_ms, count)):
            self._reported, self._differed = profile, False
            self._lines += 1
            if self._lines == MAX_LINES:
                self._thread = None


def _line(sums_ms: list[float], count: int) -> str:
    """Each sample: ms, then what was used of storage, CPU, GPU and network."""
    samples = [
        [round(lasted, 3), *(int(index == used) for used in range(IDLE))]
        for index, lasted in enumerate(sums_ms)
        if round(lasted, 3) > 0
    ]
    return json.dumps({"stages": {"iterations": count, "samples": samples}}, separators=(",", ":"))


_RECORDER = Recorder()


def iteration() -> None:
    """An iteration begins, and the one before is over. Call it at the same place of each, in one thread.

    Never blocks, never fails, but for what `on_cores` was given; does nothing outside of Penstock, and in all workers of a gang but rank 0.
    """
    look()
    _RECORDER.iteration()


def stage(name: StageName) -> AbstractContextManager[None]:
    """`with stage("cpu"):` the block's time is spent in this stage; a block inside it takes its own time out.

    Only marks of the thread that calls `iteration` count, so a loader in the background is the stage that the
    training waits for it in. GPUs work on after a call returns: wait for them (`loss.item()`) within the block.
    An unknown name marks nothing. Costs about a microsecond, nearly nothing without a reader.
    """
    return _RECORDER.stage(name)
