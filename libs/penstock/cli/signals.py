"""SIGTERM as an exception, signals held back for a moment, and a time limit: for commands that follow jobs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.exits import Exit

STOPS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM: the CI system cancels the step, or the machine goes down."""


class Expired(Exception):
    """The time limit is over."""


def exit_code(stop: KeyboardInterrupt) -> Exit:
    """The exit code by which a shell reports the signal."""
    return Exit.TERMINATED if isinstance(stop, Terminated) else Exit.INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` within the block."""

    def terminated(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held(*, really: bool = True) -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block. `really` False: at once."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS if really else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def time_limit(limit_ms: int | None) -> Iterator[None]:
    """Raises `Expired` within the block once the limit is over, also out of a blocking read."""

    def expired(number: int, frame: object) -> None:
        raise Expired

    if limit_ms is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(limit_ms, 1) / 1_000)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
