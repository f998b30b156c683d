"""`penstock up` and `penstock demo`: everything on this machine, until Ctrl-C or until the demo is over.

Light on purpose: the signal handlers are set before the services are imported.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import typer

from penstock.commandline import takes
from penstock.exits import Exit
from penstock.local.options import DemoOptions, Options

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@takes(Options)
def up(ctx: typer.Context, options: Options) -> int:
    """Start everything on this machine, until Ctrl-C.

    Exit codes: 0 stopped as asked; 1 a part failed for good; 2 a setting is wrong.
    """
    _end_while_importing(Exit.OK)
    from penstock.local.up import up as work

    return _run(lambda: work(options.absolute()), interrupted=Exit.OK)


@takes(DemoOptions)
def demo(ctx: typer.Context, options: DemoOptions) -> int:
    """Watch a dozen real training jobs being placed, run and explained (one to two minutes).

    Exit codes: 0 every job ended as expected; 1 a part failed for good, or a job ended otherwise; 2 a setting
    is wrong; 130 interrupted.
    """
    _end_while_importing(Exit.INTERRUPTED)
    from penstock.local.demo.demo import demo as work

    return _run(lambda: work(options.absolute()), interrupted=Exit.INTERRUPTED)


def _end_while_importing(code: Exit) -> None:
    """Makes a stop signal exit at once: nothing has been started, and the imports take long where nothing is
    compiled yet."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(code))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that goes away must not end a server


def _run(work: Callable[[], Coroutine[Any, Any, int]], *, interrupted: Exit) -> int:
    import uvloop

    return uvloop.run(_until_stopped(work, interrupted=interrupted))


async def _until_stopped(work: Callable[[], Coroutine[Any, Any, int]], *, interrupted: Exit) -> int:
    """Runs `work`; the first stop signal cancels it, further ones change nothing:
    the end is bounded in time."""
    from penstock.runtime.race import first_of

    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    task = asyncio.ensure_future(work())
    await first_of(task, stop.wait())
    return interrupted if task.cancelled() else task.result()
