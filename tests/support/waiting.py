# clocks: the one place that may look at them for a wait
"""Waiting for events: a wait ends with its event, or with the deadline of the whole run (`tests/README.md`).

    row = wait_until(lambda: ended(gateway.job(job_id)), f"the end of {job_id}")
    await await_until(lambda: cell.tasks == [], lambda: f"no task left of {cell.tasks}")

Ideal: each wait is woken by its event. Departure: states of other processes are looked at again and again,
where no event reaches this one.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar, overload

LOOK_S = 0.02
"""Between two looks at a state: 50 a second cost a core less than 1 %."""
RUN_ENDS = "TEST_RUN_ENDS"
"""Environment variable: when the whole run ends, in seconds of the machine's monotonic clock."""

Found = TypeVar("Found")
What = str | Callable[[], object]


def begin_run(deadline_s: float) -> None:
    """The whole run ends so many seconds from now; without effect in a process of a run that has begun."""
    os.environ.setdefault(RUN_ENDS, str(time.monotonic() + deadline_s))


def left_s() -> float:
    """Seconds left to the whole run; ≤ 0 after its deadline. Raises `KeyError` where no run has begun."""
    return float(os.environ[RUN_ENDS]) - time.monotonic()


def wait_until(found: Callable[[], Found], what: What) -> Found:
    """The first true value of `found`, which is asked again and again; blocks the thread.

    `what`: what is waited for. Raises `AssertionError` with it at the run's deadline.
    """
    began = time.monotonic()
    while not (value := found()):
        _go_on(began, what)
        time.sleep(LOOK_S)
    return value


@overload
async def await_until(found: Callable[[], Awaitable[Found]], what: What) -> Found: ...
@overload
async def await_until(found: Callable[[], Found], what: What) -> Found: ...
async def await_until(found: Callable[[], Any], what: What) -> Any:
    """The same in an event loop, where others run meanwhile; `found` may be a coroutine function."""
    began = time.monotonic()
    while True:
        value = found()
        if isawaitable(value):
            value = await value
        if value:
            return value
        _go_on(began, what)
        await asyncio.sleep(LOOK_S)


def _go_on(began: float, what: What) -> None:
    """Raises `AssertionError` when the run's deadline has passed."""
    if left_s() <= 0:
        waited_s, named = time.monotonic() - began, what if isinstance(what, str) else what()
        raise AssertionError(f"the whole run ends: waited {waited_s:.0f} s for {named}")
