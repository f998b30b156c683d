"""What surrounds a run: environment variables, failpoints as places to be killed at, and logs and callbacks
that show a bug."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from penstock.ledger.record.record import UndecodableRecord
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import IllegalTransition
from penstock.model.nouns.types import StageTimes
from penstock.runtime import crash_only, failpoints
from penstock.scheduling.groups.interleaving import RESOURCES
from penstock_services.estimator.core.stages.registry import StageRegistry
from tests.faults.laboratory.injection.policies import PolicyBug, raising_policies
from tests.faults.laboratory.inputs.jobs import CONFIGURATIONS
from tests.faults.laboratory.machines.process import PROCESS
from tests.faults.laboratory.patching import posing
from tests.faults.laboratory.world import UNEXPECTED, World
from tests.faults.rules.findings import Violation

EXPECTED = ("AppendFailed", "Fenced", "OffsetOutOfRange", "OffsetTaken", "LogError")
"""What may end an attempt of a service."""
LOGGERS = ("penstock", "penstock_services", "asyncio")
NO_COLLECTOR = SimpleNamespace(collect=lambda: 0)
"""For services that collect garbage at each restart: eighteen times a run, over the memory of the whole test
process."""


def _profiled(registry: StageRegistry, spec: JobSpec, gpus_of_worker: int) -> StageTimes | None:
    """What earlier runs have taught the estimator: each configuration is bound by another resource, and of
    every fifth job nothing is known."""
    if spec.command[-1] not in CONFIGURATIONS or sum(map(ord, spec.name)) % 5 == 0:
        return None
    bound = CONFIGURATIONS.index(spec.command[-1])
    storage, cpu, gpu, network = (90.0 if resource == bound else 5.0 for resource in range(RESOURCES))
    return StageTimes(storage_ms=storage, cpu_ms=cpu, gpu_ms=gpu, network_ms=network, iteration_ms=105.0)


class _CrashPoints:
    """Stands for the armed failpoints: at each passage the process that passes may be killed."""

    @staticmethod
    def get(name: str) -> None:
        process = PROCESS.get()
        if process is not None:
            process.step(name)


class _Findings(logging.Handler):
    """What services log and go on from, although it shows a bug."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        if process is not None and not process.alive:
            return
        error = record.exc_info[1] if record.exc_info is not None else None
        if error is not None and not isinstance(error, PolicyBug):
            self._world.fail(error)
        elif "starts again after" in record.msg and isinstance(record.args, tuple):
            self._attempt_ended(record.getMessage(), record.args[1])

    def _attempt_ended(self, text: str, kind: object) -> None:
        if kind not in EXPECTED:
            self._world.fail(Violation("crash", text))


@contextmanager
def environment(world: World, variables: Mapping[str, str]) -> Iterator[None]:
    """Settings of placers, failpoints and logging as this run needs them."""
    findings, armed, saved = _Findings(world), failpoints._armed, dict(os.environ)
    os.environ.update(variables)
    failpoints._armed = _CrashPoints()  # type: ignore[assignment]
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in LOGGERS]
    for logger, _ in loggers:
        logger.addHandler(findings)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        with (
            raising_policies(world),
            posing(crash_only, "gc", NO_COLLECTOR),
            posing(StageRegistry, "times", _profiled),
        ):
            yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        failpoints._armed = armed
        for logger, level in loggers:
            logger.removeHandler(findings)
            logger.propagate = True
            logger.setLevel(level)


def on_loop_error(world: World) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """For callbacks, which have no caller, and for tasks that no other task waits for."""

    def found(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, (Violation, IllegalTransition, UndecodableRecord, *UNEXPECTED)):
            world.fail(error)

    return found
