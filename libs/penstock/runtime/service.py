"""Process entry of a service: runs one coroutine until a stop signal, with a clear message for wrong
settings.

Every service exports `async def run(settings, stop, *, log=None, ready=None)`: it works until `stop` is
set or cancelled; `log` is given when several services share one process; `ready` is set once it serves.
"""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from typing import Protocol

import uvloop

from penstock.errors import ConfigurationError, PenstockError
from penstock.exits import Exit
from penstock.log.port import Log
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings


class Run(Protocol):
    """The entry of every service; see the module's docstring."""

    def __call__(
        self,
        settings: Settings,
        stop: asyncio.Event,
        *,
        log: Log | None = None,
        ready: asyncio.Event | None = None,
    ) -> Awaitable[None]: ...


def settle_gc() -> None:
    """Tunes the garbage collector after start-up: objects that exist now live long; collect
    rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def main(name: str, run: Run) -> None:
    """Runs one service in this process until SIGINT or SIGTERM; never returns.

    Exit status: 0 stopped, 1 failed (see the log), 2 a setting is missing or wrong.
    """
    logging.basicConfig(
        level=os.environ.get("PENSTOCK_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
    )
    try:
        settings = Settings.from_env()
        uvloop.run(_until_stopped(run, settings))
    except ConfigurationError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(Exit.BAD_SPEC)
    except PenstockError as error:  # its message is enough; a traceback would add nothing
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(Exit.PROBLEM)
    sys.exit(0)


async def _until_stopped(run: Run, settings: Settings) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    announce = asyncio.ensure_future(_announce(ready))
    serving = asyncio.ensure_future(run(settings, stop, ready=ready))
    try:
        await first_of(asyncio.shield(serving), stop.wait())
        if ready.is_set():
            await serving
        else:  # it may be waiting for a log or a database that is away, and has nothing to finish
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    finally:
        announce.cancel()


async def _announce(ready: asyncio.Event) -> None:
    """Prints one line on stdout, for which a parent process can wait."""
    await ready.wait()
    settle_gc()
    print("ready", flush=True)
