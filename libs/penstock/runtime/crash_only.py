"""Crash-only: after any failure a service drops everything it holds and starts from the log again.

There is one way up, used at every start; so it is tested at every start. The broad `except`s of the
product live here: nothing is swallowed, the attempt ends and its cause is logged.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from penstock.errors import ConfigurationError, NotAllowed, PenstockError
from penstock.retry import Backoff
from penstock.runtime.race import first_of

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
HEALTHY_S = 10.0  # an attempt that worked for so long starts the pauses anew

Result = TypeVar("Result")


class Poisoned(PenstockError):
    """Applying one input failed; `place` names it, so that the next attempt can dead-letter it."""

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"{place}: {detail}")
        self.place = place
        self.detail = detail


def applying(place: str, call: Callable[[], Result]) -> Result:
    """Runs `call`. Raises `Poisoned` with the input's place for whatever it raises."""
    try:
        return call()
    except Exception as error:
        logger.exception("cannot apply %s", place)
        raise Poisoned(place, f"{type(error).__name__}: {error}") from error


def causes(error: BaseException) -> list[BaseException]:
    """The leaves of a possibly nested exception group."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in causes(inner)]
    return [error]


async def crash_only(
    name: str,
    attempt: Callable[[], Coroutine[object, object, None]],
    stop: asyncio.Event,
    on_failure: Callable[[BaseException], None] = lambda _: None,
) -> None:
    """Runs `attempt` again and again until `stop`; failures pause it, doubling up to `LONGEST_PAUSE_S`.

    `on_failure` sees every leaf exception first. Raises `ConfigurationError` and `NotAllowed` through: no
    repetition mends those.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while not stop.is_set():
        began = loop.time()
        try:
            await first_of(attempt(), stop.wait())
            continue
        except Exception as error:  # noqa: BLE001 - the one place for it: examined, logged, tried again
            _examine(name, error, on_failure)
        if loop.time() - began > HEALTHY_S:
            backoff.reset()
        await first_of(stop.wait(), timeout_s=backoff.next_s())
        gc.collect()  # its exceptions and frames hold each other and all that it held, and else we collect rarely


def _examine(name: str, error: Exception, on_failure: Callable[[BaseException], None]) -> None:
    """Logs why an attempt ended. Raises what no repetition mends."""
    for leaf in causes(error):
        if isinstance(leaf, ConfigurationError | NotAllowed):
            raise leaf from error
        on_failure(leaf)
        logger.warning("%s starts again after %s: %s", name, type(leaf).__name__, str(leaf))
