"""Retry with exponential back-off: how long to pause between attempts, and a loop that repeats one until it
works."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


class Backoff:
    """Pauses in seconds that double from `first_s` to `longest_s`. For loops that `retry` does not fit."""

    __slots__ = ("_first_s", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """The pause after one more failure."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """An attempt succeeded: the next failure pauses `first_s` again."""
        self._next_s = self._first_s


async def retry(
    attempt: Callable[[], Awaitable[Result]],
    errors: tuple[type[Exception], ...],
    *,
    first_s: float,
    longest_s: float,
    limit_s: float | None = None,
    on_failure: Callable[[Exception, float], None] = lambda _error, _pause_s: None,
) -> Result:
    """The result of the first attempt that does not raise one of `errors`; other exceptions pass through.

    Raises the last error when the next attempt would begin later than `limit_s` after the first. `on_failure`
    gets each error that is followed by another attempt, and the pause before it in seconds.
    """
    import asyncio  # it takes long to import, and blocking programs use `Backoff` alone

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    backoff = Backoff(first_s, longest_s)
    while True:
        try:
            return await attempt()
        except errors as error:
            pause_s = backoff.next_s()
            if limit_s is not None and loop.time() + pause_s > began_s + limit_s:
                raise
            on_failure(error, pause_s)
        await asyncio.sleep(pause_s)
