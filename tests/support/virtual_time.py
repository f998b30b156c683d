"""An event loop whose time jumps: sleeping costs nothing, and a seed gives the same run every time.

Only for code without real IO (the in-memory log): a loop that waits for nothing but IO would wait for ever,
so that is an error here.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from penstock import clock

EPOCH_MS = 1_700_000_000_000
AGAIN_AFTER = (
    1_000  # turns: an event loop that is too long in a circle is told so again while it ends its tasks
)

Result = TypeVar("Result")


class Endless(KeyboardInterrupt):
    """Too many turns of the loop, or too much processor time. Of this kind, since an event loop lets nothing
    else through."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting it moves the clock on."""

    def __init__(self, max_turns: int | None) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turns, self._max_turns = 0, max_turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns += 1
        if self._max_turns is not None and self._turns > self._max_turns and self._turns % AGAIN_AFTER == 1:
            raise Endless(f"no end within {self._max_turns:,} turns of the event loop")
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and nothing is scheduled")
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 0 s and moves only when nothing is left to do."""

    def __init__(self, max_turns: int | None = None) -> None:
        self._jumping = _Jumping(max_turns)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """At once and here: another thread's time does not jump."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller gets it, as from an executor
            done.set_exception(error)
        return done


@contextmanager
def _clocks(loop: VirtualLoop, error_ms: Callable[[], int], boot_rate: Callable[[], float]) -> Iterator[None]:
    """`penstock.clock` shows the loop's time, the wall clock wrong by `error_ms()`, the boot-time clock
    running at `boot_rate()`."""
    real = getattr(clock, "time")  # noqa: B009 - as below
    virtual = SimpleNamespace(
        time_ns=lambda: max(
            0, (EPOCH_MS + error_ms()) * 1_000_000 + int(loop.time() * 1e9)
        ),  # as Linux has it
        clock_gettime=lambda which: loop.time() * boot_rate(),
        CLOCK_BOOTTIME=None,
    )
    setattr(clock, "time", virtual)  # noqa: B010 - a module's import is no attribute to a type checker
    try:
        yield
    finally:
        setattr(clock, "time", real)  # noqa: B010


def run_virtually(
    work: Coroutine[Any, Any, Result],
    error_ms: Callable[[], int] = lambda: 0,
    boot_rate: Callable[[], float] = lambda: 1.0,
    max_turns: int | None = None,
) -> Result:
    """As `asyncio.run`, in virtual time. `error_ms`, `boot_rate`: of the clocks of the process that reads
    them.

    Raises `Endless` after `max_turns` of the event loop.
    """
    loop = VirtualLoop(max_turns)
    with _clocks(loop, error_ms, boot_rate), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)
