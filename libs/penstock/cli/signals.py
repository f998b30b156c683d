"""SIGTERM and SIGHUP as exceptions, signals held back for a moment, and a time limit: for commands that
follow jobs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.exits import Exit

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM: the CI system cancels the step, or the machine goes down."""


class HungUp(KeyboardInterrupt):
    """SIGHUP: the terminal, or the session of a remote shell, is gone."""


class Expired(Exception):
    """The time limit is over."""


def exit_code(stop: KeyboardInterrupt) -> Exit:
    """The exit code by which a shell reports the signal."""
    if isinstance(stop, HungUp):
        return Exit.HUNG_UP
    return Exit.TERMINATED if isinstance(stop, Terminated) else Exit.INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, SIGHUP `HungUp` within the block;
    a signal that is ignored (`nohup`) stays so."""

    def stopped(number: int, frame: object) -> None:
        raise Terminated if number == signal.SIGTERM else HungUp

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stopped)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held(*, really: bool = True) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP take effect at the end of the block. `really` False: at once."""
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
