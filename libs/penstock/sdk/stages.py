"""Stage profile of a training script (time of an iteration per resource), and turns in a group: `iteration()`
and `with stage("storage")`.

    for batch in range(batches):
        iteration()
        with stage("storage"):
            samples = read(batch)
        with stage("gpu"):
            step(samples)

After 20 whole iterations one line reports the share of time of each stage; another line follows only if that
has changed. Source: Muri §5 (tens of iterations make a stable profile). Ideal: usage is sampled from
counters, interval by interval; departure: the script marks it, so a stage is either used or not, and all
intervals of a stage are reported as their sum, which is all that a profile needs.

In a group (jobs that share GPUs) a stage holds its resource while the block runs, see `turns`. The wait for a
turn counts neither as a stage's time nor as idle time: the profile stays that of running alone. So it is with
the time in which the iterating thread could run and waited for a core that others had
(`penstock.sdk.sharing.core_waits`): it is theirs, and changes with what else the machine does.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from penstock.sdk.checkpoint import SAVER
from penstock.sdk.cores import look
from penstock.sdk.reporter.lines import FIFO, leads, write_line
from penstock.sdk.sharing.chief import FollowedTurns, LeadingTurns, followed_turns, in_step, leading_turns
from penstock.sdk.sharing.core_waits import CoreWaits
from penstock.sdk.sharing.turns import Turns, Waits, turns_of_group

StageName = Literal["storage", "cpu", "gpu", "network"]
STAGES: tuple[StageName, ...] = ("storage", "cpu", "gpu", "network")
IDLE = len(STAGES)
WAITING = IDLE + 1  # for a turn or a core: not part of the profile
ITERATIONS = 20  # of one profile, at least
LEAST_S = 0.5  # of one profile: a shorter one is mostly noise
WARM_UP = 3  # iterations that are not counted: they load and compile what later ones reuse
CHANGED = 0.2  # of an iteration's time, as the sum of the stages' differences
MAX_LINES = 16  # bound for a script whose stages change all the time
LONG_WAIT_S = 0.5  # for a turn: as long as between looks at a steady training's step time (`progress.LOOK_S`)
MAX_WINDOW_MS = 86_400_000.0  # bound of an event's field


AnyTurns = Turns | LeadingTurns | FollowedTurns


class _StageMark(AbstractContextManager[None]):
    """Context manager of a stage, one per stage; it is stateless and so reentrant."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: "Recorder", index: int) -> None:
        self._recorder, self._index = recorder, index

    def __enter__(self) -> None:
        self._recorder.enter(self._index)

    def __exit__(self, *_: object) -> None:
        self._recorder.leave()


_NO_MARK = nullcontext()


class Recorder:
    """Sums up the time of each stage. `clock`: monotonic seconds; `write`: takes a line, returns whether it
    was written; `join`: opens the turns of this process's group, None outside of one; `core_waits`: opens the
    calling thread's waits for cores, s so far."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        write: Callable[[str], bool] = write_line,
        join: Callable[[], AnyTurns | None] = lambda: None,
        core_waits: Callable[[], Callable[[], float]] = lambda: lambda: 0.0,
    ) -> None:
        self._clock = clock
        self._write = write
        self._join = join
        self._core_waits = core_waits
        self._core_waited: Callable[[], float] = lambda: 0.0
        self._core_waited_s = 0.0
        """Its value when the present stage began."""
        self._turns: AnyTurns | None = None
        self._reports = False
        self._marks = {name: _StageMark(self, index) for index, name in enumerate(STAGES)}
        self._asked = False
        self._thread: int | None = None
        """Id of the iterating thread, whose marks count; None: nothing is recorded."""
        self._now = IDLE
        self._around: list[int] = []
        self._since = 0.0
        self._sums = [0.0] * (WAITING + 1)
        self._count = -WARM_UP
        self._reported: list[float] | None = None
        self._lines = 0
        self._differed = False
        self.waited_long: Callable[[], object] = lambda: None
        """Called after a wait of more than `LONG_WAIT_S`: the next step takes longer than those before."""

    def iteration(self) -> None:
        """As the function of that name."""
        if self._thread != threading.get_ident():
            if not self._asked:
                self._begin()
            return
        self._switch(self._now)
        self._count += 1
        if self._count == 0:
            self._sums = [0.0] * (WAITING + 1)
        elif self._reports and self._count >= ITERATIONS and sum(self._sums[:WAITING]) >= LEAST_S:
            self._report_profile([1_000 * part for part in self._sums[:WAITING]], self._count)
            self._sums, self._count = [0.0] * (WAITING + 1), 0

    def stage(self, name: StageName) -> AbstractContextManager[None]:
        """As the function of that name."""
        if self._thread is None:
            return _NO_MARK
        return self._marks.get(name, _NO_MARK)

    def enter(self, index: int) -> None:
        """Begins this stage. In a group, waits for its turn."""
        if self._thread == threading.get_ident():
            before = self._now
            self._turn(index)
            self._around.append(before)
            self._switch(index)

    def leave(self) -> None:
        """Ends this stage and returns to the surrounding one."""
        if self._around and self._thread == threading.get_ident():
            outer = self._around.pop()
            self._turn(outer)
            self._switch(outer)

    @property
    def waits(self) -> Waits:
        """Waits for turns so far."""
        return Waits() if self._turns is None else self._turns.waits

    def yield_turn(self) -> None:
        """Gives its turn back, if it has one, before work that takes long."""
        if self._turns is not None and self._thread == threading.get_ident():
            self._turns.change(None)

    def forked(self) -> None:
        """For a forked child: it marks nothing, and its parent still holds its turn."""
        self._asked, self._thread = True, None
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.close()

    def _begin(self) -> None:
        self._asked, self._reports = True, leads()
        self._turns = self._join()
        if self._reports or self._turns is not None:
            self._thread = threading.get_ident()
            if self._reports:
                self._core_waited = self._core_waits()
            self._since, self._core_waited_s = self._clock(), self._core_waited()

    def _turn(self, index: int) -> None:
        """Gives back its turn, if it has one, and takes the turn of this stage, unless it is idle."""
        if self._turns is not None:
            self._switch(WAITING)
            self._turns.change(index if index < IDLE else None)

    def _switch(self, index: int) -> None:
        now, core_waited_s = self._clock(), self._core_waited()
        passed_s = now - self._since
        if passed_s > LONG_WAIT_S and self._now == WAITING:
            self.waited_long()
        waited_s = min(core_waited_s - self._core_waited_s, passed_s)
        self._sums[self._now] += passed_s - waited_s
        self._sums[WAITING] += waited_s
        self._since, self._core_waited_s, self._now = now, core_waited_s, index

    def _report_profile(self, sums_ms: list[float], count: int) -> None:
        """Reports the first profile, then one that differs in two windows in a row, so that a checkpoint is
        not a change."""
        if self._lines == MAX_LINES or not any(sums_ms[:IDLE]) or sum(sums_ms) > MAX_WINDOW_MS:
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
            if self._lines == MAX_LINES and self._turns is None:
                self._thread = None


def _line(sums_ms: list[float], count: int) -> str:
    """The profile's line. Each sample: ms, then the use of storage, CPU, GPU and network."""
    samples = [
        [round(lasted, 3), *(int(index == used) for used in range(IDLE))]
        for index, lasted in enumerate(sums_ms)
        if round(lasted, 3) > 0
    ]
    return json.dumps({"stages": {"iterations": count, "samples": samples}}, separators=(",", ":"))


def _join() -> AnyTurns | None:
    """The turns of this process's group, by its rank."""
    if not os.environ.get(FIFO) or os.environ.get("PENSTOCK_ROLE") == "ps":
        return None
    if not leads():
        return followed_turns(IDLE, lambda: SAVER.ends) if in_step() else None
    turns = turns_of_group(STAGES, lambda: SAVER.ends)
    return leading_turns(turns, IDLE) if turns is not None and in_step() else turns


_RECORDER = Recorder(join=_join, core_waits=CoreWaits)
os.register_at_fork(after_in_child=_RECORDER.forked)


def iteration() -> None:
    """Marks the beginning of an iteration and the end of the one before. Call it at the same place of each,
    in one thread.

    Never blocks, never fails, except by callbacks of `on_cores`; does nothing outside of Penstock, and in all
    workers of a gang but rank 0.
    """
    look()
    _RECORDER.iteration()


def waits() -> Waits:
    """Waits of this process for turns of its group;
    zeros outside of one, and without calls of `iteration`."""
    return _RECORDER.waits


def on_long_wait(told: Callable[[], object]) -> None:
    """Calls this after each long wait for a turn."""
    _RECORDER.waited_long = told


def yield_turn() -> None:
    """Gives the turn back before long work inside of a stage, such as a save; the rest of the block runs
    without a turn."""
    _RECORDER.yield_turn()


def stage(name: StageName) -> AbstractContextManager[None]:
    """`with stage("cpu"):` the block's time counts for this stage; the time of a block inside it is
    subtracted.

    Where other jobs have the same GPUs the block begins when none of them is in this stage, or after a
    bounded wait in any case. A block inside another gives the outer one's resource to others meanwhile.

    Only marks of the thread that calls `iteration` count, so a background loader counts by the wait for it,
    in the stage of that wait. GPUs work on after a call returns: wait for them (`loss.item()`) within the
    block. An unknown name marks nothing. Costs some microseconds, twenty with GPUs, nearly nothing without a
    reader.
    """
    return _RECORDER.stage(name)
