"""Runs all services in one process, on one shared log. Each restarts itself (crash-only); one that cannot
ends `up`."""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, cast

from penstock.errors import PenstockError
from penstock.local.children import all_ready, watched
from penstock.log.port import Log
from penstock.runtime.race import cancelled
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock.scheduling.profiles import known_profile

logger = logging.getLogger(__name__)

NAMES = ("placer", "estimator", "batcher", "migrator", "contention-guard", "projector", "gateway")
START_TIMEOUT_S = 120.0  # as of a child; a placer folds its whole ledger first
STOP_TIMEOUT_S = 1.5  # then it is cancelled; all of `up` must end within 5 s


class ServiceFailed(PenstockError):
    """A service cannot go on, or did not start in time; the cause is chained."""


def entry(name: str) -> Run:
    """The `run` function of a service."""
    return cast(Run, importlib.import_module(f"penstock_services.{name.replace('-', '_')}.shell.service").run)


def check_settings(env: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` for a setting that a service would refuse, before anything is started."""
    importlib.import_module("penstock_services.placer.shell.term").placer_settings(env)
    importlib.import_module("penstock_services.gateway.shell.options").Options.from_env(env)


class Acts(NamedTuple):
    """What is done to running jobs under the profile of this name."""

    profile: str
    eliminates: bool
    """Whether its contention-guard slows jobs without GPUs."""
    moves: bool
    """Whether it has a stage that moves jobs."""


def acts_of(env: Mapping[str, str]) -> Acts:
    """Under these settings."""
    settings = importlib.import_module("penstock_services.placer.shell.term").placer_settings(env)
    profile = known_profile(settings)
    if profile is None:
        return Acts(settings.profile, eliminates=False, moves=False)
    eliminates = profile.guard is not None and profile.guard.eliminates
    return Acts(settings.profile, eliminates, profile.migrate is not None)


async def _serve(
    name: str, settings: Settings, log: Log | None, stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Runs one service until `stop`. Raises `ServiceFailed` when it ends before."""
    try:
        await entry(name)(settings, stop, log=log, ready=ready)
    except Exception as error:
        logger.error("%s cannot go on", name, exc_info=error)
        raise ServiceFailed(f"{name}: {str(error) or type(error).__name__}") from error
    if not stop.is_set():
        raise ServiceFailed(f"{name} ended without having been asked to")


@asynccontextmanager
async def all_services(
    settings: Settings, log: Log | None, log_file: Path, failed: "asyncio.Future[None]"
) -> AsyncIterator[None]:
    """Runs all services inside the block;
    `failed` gets the error of the first that cannot go on. Raises `ServiceFailed`."""
    stop = asyncio.Event()
    ready = {name: asyncio.Event() for name in NAMES}
    tasks: list[asyncio.Task[None]] = []
    try:
        for name in NAMES:
            tasks.append(watched(_serve(name, settings, log, stop, ready[name]), failed, name))
            await asyncio.sleep(0)  # each import blocks the loop: a stop signal is handled between two
        if not await all_ready(ready.values(), failed, START_TIMEOUT_S):
            late = ", ".join(name for name, event in ready.items() if not event.is_set())
            raise ServiceFailed(
                f"not ready within {START_TIMEOUT_S:.0f} s: {late}; {log_file} has the reason"
            )
        yield
    finally:
        stop.set()
        _, slow = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        for task in slow:
            logger.warning("%s did not stop within %s s; cancelling it", task.get_name(), STOP_TIMEOUT_S)
        await cancelled(tasks)
