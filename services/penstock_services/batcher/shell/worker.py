"""Worker process in which plans are computed: alive as long as the settings leave something to plan, each
plan bounded in time."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.runtime.pool import WorkerDied, WorkerPool
from penstock_services.batcher.core.batcher import Work, solve

LOG = logging.getLogger(__name__)

NICENESS = 5  # a machine's cores belong to its jobs and to the placer first
STAYS_S = 365 * 86_400.0  # idle time after which it ends
MAX_SOLVE_S = 30.0  # far beyond any window; a plan of which jobs run is out of date by then, too


class TooLong(PenstockError):
    """A plan was not ready within `MAX_SOLVE_S`; its worker was ended."""


class Worker:
    """Computes one plan at a time. Once warm it stays: a burst comes after a long time without events, and a
    cold start takes longer than most windows last."""

    def __init__(self, solving: Callable[[Work], Any] = solve) -> None:
        """`solving`: the function that the worker runs; importable there."""
        self._solving = solving
        self._pool = WorkerPool(niceness=NICENESS, idle_s=STAYS_S)
        self._warming: asyncio.Future[None] | None = None

    def warm_up(self) -> "asyncio.Future[None]":
        """The settings leave something to plan: the worker starts, imports its modules, and waits. Nothing if
        it has done so. Done when it is warm."""
        if self._warming is None:
            self._warming = asyncio.ensure_future(self._begin())
        return self._warming

    async def _begin(self) -> None:
        try:
            await self._pool.run(import_all, self._solving)
        except PenstockError as error:
            LOG.warning("the worker did not start: %s", error)

    async def solve(self, work: Work) -> Any:
        """The answer. Raises what `solve` raised there, `WorkerDied`, or `TooLong`."""
        try:
            async with asyncio.timeout(MAX_SOLVE_S):
                return await self._pool.run(self._solving, work)
        except WorkerDied:
            self._warming = None
            raise
        except TimeoutError:
            self.close()
            raise TooLong(f"no plan within {MAX_SOLVE_S:.0f} s") from None

    def close(self) -> None:
        """Ends the worker; a plan under way is lost. The next use starts another one."""
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None
        self._pool.close()


def import_all(_solving: Callable[[Work], Any]) -> None:
    """Runs in the worker. The function arrives by its name, so its module has been imported, with all that it
    needs but for what only matchings need."""
    import scipy.optimize  # noqa: F401
