"""Telemetry of a real node-reporter: what changes, and of a training beside programs that take its cores away what the contention-guard needs."""

import itertools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.codegen.schemas import ROOT
from penstock.log.port import Partition, Reader
from penstock.model import external_events
from penstock.model.envelope import from_wire
from penstock.model.external_events import TelemetrySampled
from penstock.model.topics import Topic, node_partition
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell import meters, pressure, sampler
from penstock_services.node_reporter.shell.pinning import real_cores
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.records import read_record
from tests.support import node_fixtures
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import (
    NODE,
    WAIT_S,
    Cell,
    eventually,
    reporter_process,
    start_order,
    stop_order,
    working,
)

options, embedded_cell = node_fixtures.options, node_fixtures.embedded_cell
broker, cell, node = node_fixtures.broker, node_fixtures.cell, node_fixtures.node
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
TELEMETRY = Partition(Topic.TELEMETRY, node_partition(NODE))
HOGS = 8  # of one core: a training beside them has a ninth of it

LOADERS = """
import os, sys, time
child = os.fork()
until = time.monotonic() + 8
while time.monotonic() < until:
    pass
if child == 0:
    os._exit(0)
os.wait()
time.sleep(600)
"""

FLOODS = """
import os, random
fifo = os.open(os.environ["PENSTOCK_PHASE_FILE"], os.O_WRONLY)  # which waits where it is full
while True:
    lines = [
        '{"window":{"steps":1,"step_ms":%d}}' % random.randint(1, 10**8),
        '{"loss":{"done":1,"loss":%d}}' % random.randint(1, 10**8),
        '{"stages":{"iterations":1,"samples":[[1,1,0,0,0]]}}',
        random.choice(("train", "save")),
    ]
    os.write(fifo, "".join(f"{line}\\n" for line in lines).encode())
"""


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
    telemetry = Telemetry(embedded_cell.log.reader({TELEMETRY: 0}))
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


async def test_the_kernel_wakes_the_node_when_a_task_waits_and_one_sample_ends_it(
    node: Options, cell: Cell, broker: MemoryBroker
) -> None:
    """Two loaders compute on the one core of their task; then it sleeps."""
    joined = await cell.until(external_events.NodeJoined)
    if joined.node.measures.contention != "pressure":
        pytest.skip("here tasks have no cgroup v2 with pressure stall information")
    await seen_to_wait(cell, broker)
    started = read_record(node.state_dir / "tasks/job-1.1.0@1/started.json", Started)
    assert started is not None
    await eventually(lambda: not any(Path(group).exists() for group in started.groups))


async def test_without_pressure_stall_information_the_waiting_of_threads_is_read(
    options: Options, cell: Cell, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was built, or started, without it."""
    monkeypatch.setattr(pressure, "triggers", lambda path: False)
    monkeypatch.setattr(meters, "arm", lambda path: None)
    async with working(options, MemoryLog(broker, "node-reporter")):
        joined = await cell.until(external_events.NodeJoined)
        if joined.node.measures.contention == "none":
            pytest.skip("this kernel does not report what threads have waited (schedstat)")
        assert joined.node.measures.contention == "schedstat"
        await seen_to_wait(cell, broker)


async def seen_to_wait(cell: Cell, broker: MemoryBroker) -> None:
    """Runs the loaders, and ends them once the node has reported that they wait, and that they wait no more."""
    telemetry = Telemetry(MemoryLog(broker, "guard").reader({TELEMETRY: 0}))
    await cell.order(start_order(1, sys.executable, "-c", LOADERS))
    started = await cell.until(external_events.TaskStarted)

    def percents(samples: list[TelemetrySampled]) -> list[float]:
        found = [sample.cpu_stalled_percent for sample in samples if sample.task_id == started.task_id]
        return [percent for percent in found if percent is not None]

    await telemetry.until(lambda samples: max(percents(samples), default=0) >= 50)
    await telemetry.until(lambda samples: percents(samples)[-1] < 10)
    await cell.order(stop_order(2, started.task_id, grace_ms=0))
    await cell.until(external_events.TaskExited)


async def test_telemetry_is_published_on_change_only(
    node: Options, cell: Cell, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steady task is one sample; a task that grows is another one."""
    monkeypatch.setattr(sampler, "PERIOD_S", 0.1)
    grow = "import time; time.sleep(1); x = b'1' * (100 << 20); time.sleep(1)"
    await cell.order(
        start_order(1, "sleep", "2", gpus=(0,)), start_order(2, sys.executable, "-c", grow, gpus=(1,))
    )
    await cell.until(external_events.TaskExited, task_id="job-1.1.0")
    exited = await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    samples = [from_wire(record.headers, record.value).data for record in broker.records(TELEMETRY)]
    memory: dict[str | None, list[int | None]] = {"job-1.1.0": [], "job-2.1.0": []}
    for sample in samples:
        assert isinstance(sample, TelemetrySampled)
        if sample.host_memory_mib is not None:
            memory[sample.task_id].append(sample.host_memory_mib)
    assert len(memory["job-1.1.0"]) <= 4, "of twenty looks; it may be seen while it starts"
    assert max(mib or 0 for mib in memory["job-2.1.0"]) >= 100
    assert exited.usage.host_memory_mib >= 100


async def test_a_script_that_floods_its_node_with_samples_is_bounded_and_others_start_as_ever(
    node: Options, cell: Cell, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Four hostile scripts write lines as fast as they can: what is published of them is what the bounds allow, the rest is counted."""
    caplog.set_level("INFO")
    numbers = itertools.count(1)
    quiet_s = [await start_and_stop(cell, next(numbers)) for _ in range(5)]
    floods = [
        start_order(number, sys.executable, "-c", FLOODS, gpus=()) for number in itertools.islice(numbers, 4)
    ]
    began_s = time.monotonic()
    await cell.order(*floods)
    for flood in floods:
        await cell.until(external_events.TaskStarted, task_id=flood.task_id)
    flooded_s = [await start_and_stop(cell, next(numbers)) for _ in range(15)]
    for flood in floods:
        await cell.order(stop_order(next(numbers), flood.task_id, grace_ms=0))
        await cell.until(external_events.TaskExited, task_id=flood.task_id)
    lasted_s = time.monotonic() - began_s
    samples = [
        from_wire(record.headers, record.value, Topic.TELEMETRY).data for record in broker.records(TELEMETRY)
    ]
    hostile = {flood.task_id for flood in floods}
    steps = [sample for sample in samples if sample.task_id in hostile and sample.step_ms is not None]  # type: ignore[attr-defined]
    losses = [sample for sample in samples if sample.task_id in hostile and sample.loss is not None]  # type: ignore[attr-defined]
    assert 4 <= len(steps) <= 4 * (lasted_s + 1), "a second apart"
    assert 4 <= len(losses) <= 4 * (lasted_s / 5 + 1)
    dropped = [int(found) for found in re.findall(r"(\d+) were not passed on", caplog.text)]
    assert sum(dropped) >= 100 * len(steps), "and visible in the log"
    assert statistics.median(flooded_s) <= 3 * statistics.median(quiet_s) + 1


async def start_and_stop(cell: Cell, number: int) -> float:
    """How long a task takes from its order to the report of its exit, s."""
    began_s = time.monotonic()
    await cell.order(start_order(number, "true", task_id=f"other-{number}.1.0"))
    await cell.until(external_events.TaskExited, task_id=f"other-{number}.1.0")
    return time.monotonic() - began_s
