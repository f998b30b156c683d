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

from penstock.errors import ConfigurationError, FileMissing, PenstockError
from penstock.exits import Exit
from penstock.log.port import Log
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings


HEALTH = "PENSTOCK_HEALTH"
"""Variable: path of a socket at which the service answers `ready`, for a container's health check."""


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

    Exit status: 0 stopped, 1 failed (see the log) or a setting's file is missing, 2 a setting is wrong.
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
        sys.exit(Exit.PROBLEM if isinstance(error, FileMissing) else Exit.BAD_SPEC)
    except PenstockError as error:  # its message is enough; a traceback would add nothing
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(Exit.PROBLEM)
    sys.exit(0)


async def _until_stopped(run: Run, settings: Settings) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    announce = asyncio.ensure_future(_announce(ready, os.environ.get(HEALTH)))
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


async def _announce(ready: asyncio.Event, health: str | None) -> None:
    """Prints one line on stdout, for which a parent process can wait, and answers with it at this socket: its
    client learns that the service serves, and that the loop turns."""
    await ready.wait()
    settle_gc()
    if health:
        await asyncio.start_unix_server(_answer, health)
    print("ready", flush=True)


async def _answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"ready\n")
    writer.close()
