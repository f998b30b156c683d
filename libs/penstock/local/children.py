"""Supervisor of child processes: a child never outlives this process, is restarted when it crashes, and is
stopped within a bound.

Ideal: a child exists exactly as long as the block that started it. Departure: after a kill -9 of this process
none is left to clean up, so the kernel signals the child (PDEATHSIG).
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.backoff import Backoff
from penstock.errors import PenstockError
from penstock.runtime.parents import ends_with_parent
from penstock.runtime.race import first_of

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0
CALM_S = 30.0  # a child that ran for so long starts again without delay
GRACE_S = 3.0  # between SIGTERM and SIGKILL; all of `up` must end within 5 s
START_TIMEOUT_S = 120.0
"""For one that hangs: one that ends is noticed at once, and a busy machine needs more than 20 s to start what
takes a processor three seconds."""


async def all_ready(
    events: Iterable[asyncio.Event], failed: "asyncio.Future[None]", timeout_s: float
) -> bool:
    """Waits until all are set; False on time-out. Raises the error of `failed` if that comes first."""

    async def all_set() -> None:
        for event in events:
            await event.wait()

    return await first_of(all_set(), asyncio.shield(failed), timeout_s=timeout_s)


def watched(
    work: Coroutine[Any, Any, None], failed: "asyncio.Future[None]", name: str
) -> "asyncio.Task[None]":
    """Runs `work` as a task; its error becomes that of `failed`, if it is the first."""

    def on_end(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
            failed.set_exception(error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_end)
    return task


class ChildFailed(PenstockError):
    """A child could not be started at all. The message holds the tail of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to run; `log_path` gets its output."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path


async def keep_running(
    command: Command, ready: asyncio.Event, on_crash: Callable[[str, int, float], None]
) -> None:
    """Runs the child until cancelled; sets `ready` after its first line "ready" on stdout.

    When it exits, `on_crash(name, exit code, back-off in s)` is called and it is started again.
    Raises `ChildFailed` when it never became ready.
    """
    backoff = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S)
    loop = asyncio.get_running_loop()
    while True:
        started_s = loop.time()
        code = await _run_once(command, ready)
        if not ready.is_set():
            raise ChildFailed(
                f"{command.name} ended with {_how(code)} before it was ready:\n{tail(command.log_path)}"
            )
        if loop.time() - started_s > CALM_S:
            backoff.reset()
        pause_s = backoff.next_s()
        on_crash(command.name, code, pause_s)
        await asyncio.sleep(pause_s)


async def _run_once(command: Command, ready: asyncio.Event) -> int:
    """Starts the child and waits for its end; when cancelled, ends the child first."""
    with command.log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=dict(command.env),
            start_new_session=True,  # Ctrl-C reaches us, and we end it in order
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.strip() == b"ready":
                    ready.set()
                else:
                    log.write(line)
                    log.flush()
            return await process.wait()
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, a bounded wait, SIGKILL; returns when it is reaped."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log file."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"
