"""A training beside programs that take its cores away: a real node-reporter publishes what the contention-guard needs to see of it."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from infra.codegen.schemas import ROOT
from penstock.log.port import Partition, Reader
from penstock.model import external_events
from penstock.model.envelope import from_wire
from penstock.model.external_events import TelemetrySampled
from penstock.model.topics import Topic, node_partition
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.pinning import real_cores
from tests.support import node_fixtures
from tests.support.node_cell import NODE, WAIT_S, Cell, reporter_process, start_order, stop_order

options, embedded_cell = node_fixtures.options, node_fixtures.embedded_cell
nothing_left = node_fixtures.nothing_left

TRAINS = """
import numpy as np
from penstock.sdk.progress import progress
rng = np.random.default_rng(0)
samples, weights = rng.standard_normal((512, 256)), rng.standard_normal((256, 256))
for done in range(1, 10_000_000):
    for _ in range(5):
        weights -= 1e-9 * samples.T @ np.tanh(samples @ weights)
    progress(done)
"""
HOGS = 8  # of one core: a training beside them has a ninth of it


class Telemetry:
    """What the node has published so far."""

    def __init__(self, reader: Reader) -> None:
        self.samples: list[TelemetrySampled] = []
        self._reader = reader

    async def until(self, enough: Callable[[list[TelemetrySampled]], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not enough(self.samples):
            left_ms = round((deadline - time.monotonic()) * 1_000)
            assert left_ms > 0, f"it never became so; came: {self.samples}"
            for record in await self._reader.read(timeout_ms=left_ms):
                sample = from_wire(record.headers, record.value, Topic.TELEMETRY).data
                assert isinstance(sample, TelemetrySampled)
                self.samples.append(sample)


def steps_ms(samples: list[TelemetrySampled]) -> list[float]:
    return [sample.step_ms for sample in samples if sample.step_ms is not None]


def stalled(samples: list[TelemetrySampled], task_id: str | None) -> float:
    """The greatest that was published."""
    found = [sample.cpu_stalled_percent for sample in samples if sample.task_id == task_id]
    return max((percent for percent in found if percent is not None), default=0.0)


@contextmanager
def hogs(core: int) -> Iterator[None]:
    """Programs that never sleep, on this core; each in a session of its own, to which schedulers may give equal parts of it."""
    busy = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", busy], start_new_session=True) for _ in range(HOGS)
    ]
    try:
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.wait()


async def test_a_training_whose_core_is_taken_is_seen_to_wait_and_to_slow_down(
    options: Options, embedded_cell: Cell, dsn: str
) -> None:
    """Preprocessing of other jobs fills its core, then ends: its step time rises, its node reports the waiting, and the step time falls again."""
    telemetry = Telemetry(embedded_cell.log.reader({Partition(Topic.TELEMETRY, node_partition(NODE)): 0}))
    env = {"PYTHONPATH": str(ROOT / "libs")}
    async with reporter_process(options, dsn):
        joined = await embedded_cell.until(external_events.NodeJoined)
        measures = joined.node.measures
        assert measures is not None
        if measures.contention == "none":
            pytest.skip("this kernel reports neither pressure (PSI) nor the waiting of threads (schedstat)")
        await embedded_cell.order(start_order(1, sys.executable, "-c", TRAINS, env=env))
        started = await embedded_cell.until(external_events.TaskStarted)
        await telemetry.until(lambda samples: bool(steps_ms(samples)))
        alone_ms = min(steps_ms(telemetry.samples))
        begun = len(telemetry.samples)
        with hogs(real_cores([0])[0]):
            await telemetry.until(
                lambda samples: (
                    max(steps_ms(samples)) >= 2 * alone_ms
                    and stalled(samples[begun:], started.task_id) >= 50
                    and stalled(samples, None) >= 50
                )
            )
        slow_ms, slowed = max(steps_ms(telemetry.samples)), len(telemetry.samples)
        await telemetry.until(
            lambda samples: min(steps_ms(samples[slowed:]), default=slow_ms) <= 0.6 * slow_ms
        )
        await embedded_cell.order(stop_order(2, started.task_id, grace_ms=0))
        await embedded_cell.until(external_events.TaskExited)
