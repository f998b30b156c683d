"""Crash-only supervision of a service: after any failure it drops its state and starts from the log again.

There is one start-up path, used at every start and so tested at every start. The broad `except`s of the
product are here: no error is swallowed, the attempt ends and its cause is logged.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from penstock.backoff import Backoff
from penstock.errors import ConfigurationError, NotAllowed, PenstockError
from penstock.ledger.record.record import UndecodableRecord
from penstock.runtime.race import first_of

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
HEALTHY_S = 10.0  # an attempt that worked for so long resets the back-off

Result = TypeVar("Result")


class Poisoned(PenstockError):
    """Applying one input failed; `place` names it, so that the next attempt can dead-letter it."""

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"{place}: {detail}")
        self.place = place
        self.detail = detail


def applying(place: str, call: Callable[[], Result]) -> Result:
    """Runs `call`. Raises `UndecodableRecord`,
    and `Poisoned` with the input's place for any other exception."""
    try:
        return call()
    except UndecodableRecord:
        raise
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
    """Repeats `attempt` until `stop`; pauses after failures, doubling up to `LONGEST_PAUSE_S`.

    `on_failure` gets every leaf exception first. `ConfigurationError` and `NotAllowed` pass through: no
    retry mends those.
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
        # the attempt's exceptions and frames form cycles that hold its state, and collections are rare
        gc.collect()


def _examine(name: str, error: Exception, on_failure: Callable[[BaseException], None]) -> None:
    """Logs why an attempt ended. Raises errors that no retry mends."""
    for leaf in causes(error):
        if isinstance(leaf, ConfigurationError | NotAllowed):
            raise leaf from error
        on_failure(leaf)
        logger.warning("%s starts again after %s: %s", name, type(leaf).__name__, str(leaf))
