"""All services in this one process, on one shared log. Each mends itself (crash-only); one that cannot ends `up`."""

import asyncio
import importlib
import logging
from pathlib import Path
from typing import cast

from penstock.errors import PenstockError
from penstock.local.children import all_ready
from penstock.log.port import Log
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings

logger = logging.getLogger(__name__)

NAMES = ("placer", "estimator", "projector", "gateway")
START_TIMEOUT_S = 30.0  # a placer folds its whole ledger first
STOP_TIMEOUT_S = 1.5  # then it is cancelled; all of `up` must end within 5 s


class ServiceFailed(PenstockError):
    """A service cannot go on, or did not start in time; the cause is chained."""


def entry(name: str) -> Run:
    """The `run` of a service."""
    return cast(Run, importlib.import_module(f"penstock_services.{name}.shell.service").run)


class Services:
    """Runs them until `stop`. `failed` holds the error of the first that could not go on."""

    def __init__(self, settings: Settings, log: Log | None, log_file: Path) -> None:
        self._log_file = log_file
        self._settings = settings
        self._log = log
        self._stops: list[asyncio.Event] = []  # one each: a service may set its own when it fails
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts all and waits until each serves. Raises `ServiceFailed`."""
        ready = {name: asyncio.Event() for name in NAMES}
        for name in NAMES:
            stop = asyncio.Event()
            self._stops.append(stop)
            task = asyncio.ensure_future(entry(name)(self._settings, stop, log=self._log, ready=ready[name]))
            task.set_name(name)
            task.add_done_callback(self._on_end)
            self._tasks.append(task)
        if not await all_ready(ready.values(), self.failed, START_TIMEOUT_S):
            late = ", ".join(name for name, event in ready.items() if not event.is_set())
            raise ServiceFailed(
                f"not ready within {START_TIMEOUT_S:.0f} s: {late}; {self._log_file} has the reason"
            )

    async def stop(self) -> None:
        """Ends them; idempotent."""
        self._stopping = True
        for stop in self._stops:
            stop.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
            for task in late:
                logger.warning("%s did not stop within %s s; cancelling it", task.get_name(), STOP_TIMEOUT_S)
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if not self.failed.cancel():
            self.failed.exception()  # marks the exception as retrieved

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or self._stopping or self.failed.done():
            return
        cause = task.exception()
        if cause is None:
            self.failed.set_exception(ServiceFailed(f"{task.get_name()} ended without having been asked to"))
            return
        logger.error("%s cannot go on", task.get_name(), exc_info=cause)
        failure = ServiceFailed(f"{task.get_name()}: {str(cause) or type(cause).__name__}")
        failure.__cause__ = cause
        self.failed.set_exception(failure)
