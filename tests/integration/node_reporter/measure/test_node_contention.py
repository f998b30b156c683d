"""Telemetry of a real node-reporter: what changes, and of a training beside programs that take its cores away
what the contention-guard needs."""

import asyncio
import itertools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.codegen.schemas import ROOT
from penstock.model.inputs import external_events
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.wire.envelope import from_wire
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.limits import pressure
from penstock_services.node_reporter.shell.limits.pinning import real_cores
from penstock_services.node_reporter.shell.measure import meters, sampler
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.records import read_record
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    TELEMETRY,
    Cell,
    Telemetry,
    reporter_process,
    start_order,
    stop_order,
    working,
)
from tests.support.waiting import await_until

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
HOGS = 8  # of one core: a training beside them has a ninth of it

LOADERS = """
import os, sys, time
child = os.fork()
while not os.path.exists(sys.argv[1]):
    pass
if child == 0:
    os._exit(0)
os.wait()
time.sleep(600)
"""
GROWS = """
import sys, time
while not open(sys.argv[1]).read():
    time.sleep(0.05)
kept = b"1" * (100 << 20)
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
    os.write(fifo, "".join(f"{line}\\n" for line in lines * 2).encode())
"""


def steps_ms(samples: list[TelemetrySampled]) -> list[float]:
    return [sample.step_ms for sample in samples if sample.step_ms is not None]


def stalled(samples: list[TelemetrySampled], task_id: str | None) -> float:
    """The greatest that was published."""
    found = [sample.cpu_stalled_percent for sample in samples if sample.task_id == task_id]
    return max((percent for percent in found if percent is not None), default=0.0)


@contextmanager
def hogs(core: int) -> Iterator[None]:
    """Programs that never sleep, on this core; each in a session of its own, to which schedulers may give
    equal parts of it."""
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


@pytest.mark.slow  # its step times are those of a machine that has nothing else to do: `make live`
async def test_a_training_whose_core_is_taken_is_seen_to_wait_and_to_slow_down(
    options: Options, embedded_cell: Cell, dsn: str
) -> None:
    """Preprocessing of other jobs fills its core, then ends: its step time rises, its node reports the
    waiting, and the step time falls again."""
    telemetry = Telemetry(embedded_cell.log)
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
    await telemetry.close()


async def test_the_kernel_wakes_the_node_when_a_task_waits_and_one_sample_ends_it(
    node: Options, cell: Cell, broker: MemoryBroker
) -> None:
    """Two loaders compute on the one core of their task; then it sleeps."""
    joined = await cell.until(external_events.NodeJoined)
    if joined.node.measures.contention != "pressure":
        pytest.skip("here tasks have no cgroup v2 with pressure stall information")
    await seen_to_wait(node, cell, broker)
    started = read_record(node.state_dir / "tasks/job-1.1.0@1/started.json", Started)
    assert started is not None
    await await_until(
        lambda: not any(Path(group).exists() for group in started.groups), f"{started.groups} to be removed"
    )


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
        await seen_to_wait(options, cell, broker)


async def seen_to_wait(options: Options, cell: Cell, broker: MemoryBroker) -> None:
    """Runs the loaders until the node has reported that they wait, and ends them once it has that they wait
    no more."""
    telemetry, enough = Telemetry(MemoryLog(broker, "guard")), options.state_dir.parent / "enough"
    await cell.order(start_order(1, sys.executable, "-c", LOADERS, str(enough)))
    started = await cell.until(external_events.TaskStarted)

    def percents(samples: list[TelemetrySampled]) -> list[float]:
        found = [sample.cpu_stalled_percent for sample in samples if sample.task_id == started.task_id]
        return [percent for percent in found if percent is not None]

    await telemetry.until(lambda samples: max(percents(samples), default=0) >= 50)
    enough.touch()
    await telemetry.until(lambda samples: percents(samples)[-1] < 10)
    await cell.order(stop_order(2, started.task_id, grace_ms=0))
    await cell.until(external_events.TaskExited)


async def test_telemetry_is_published_on_change_only(
    node: Options, cell: Cell, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A steady task is one sample; a task that grows is another one."""
    monkeypatch.setattr(sampler, "PERIOD_S", 0.1)
    telemetry, go = Telemetry(MemoryLog(broker, "guard")), tmp_path / "go"
    go.touch()
    steady = start_order(1, "sleep", "600", gpus=(0,))
    grows = start_order(2, sys.executable, "-c", GROWS, str(go), gpus=(1,))
    await cell.order(steady, grows)

    def memory(task_id: str) -> list[int]:
        found = [sample.host_memory_mib for sample in telemetry.samples if sample.task_id == task_id]
        return [mib for mib in found if mib is not None]

    await telemetry.until(lambda _: bool(memory(steady.task_id) and memory(grows.task_id)))
    await asyncio.sleep(1)  # clock: in which a sample of each look would come
    go.write_text("go")
    await telemetry.until(lambda _: max(memory(grows.task_id)) >= 100)
    assert len(memory(steady.task_id)) <= 4, "of ten looks; it may be seen while it starts"
    await cell.order(*(stop_order(3, order.task_id, grace_ms=0) for order in (steady, grows)))
    exited = await cell.until(external_events.TaskExited, task_id=grows.task_id)
    assert exited.usage.host_memory_mib >= 100


async def test_a_script_that_floods_its_node_with_samples_is_bounded_and_others_start(
    node: Options, cell: Cell, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Four hostile scripts write lines as fast as they can: what is published of them is what the bounds
    allow, the rest is counted."""
    caplog.set_level("INFO")
    telemetry = Telemetry(MemoryLog(broker, "guard"))
    floods = [start_order(number, sys.executable, "-c", FLOODS, gpus=()) for number in range(1, 5)]
    hostile = {flood.task_id for flood in floods}
    began_s = time.monotonic()  # clock: what is published is bounded by the time that passes, however much
    await cell.order(*floods)

    def who(value: str) -> list[str | None]:
        found = [sample for sample in telemetry.samples if getattr(sample, value) is not None]
        return [sample.task_id for sample in found if sample.task_id in hostile]

    for number in range(5, 10):
        await cell.order(start_order(number, "true"))
        await cell.until(external_events.TaskExited, task_id=f"job-{number}.1.0")
        assert not hostile & {event.task_id for event in cell.events(external_events.TaskExited)}
    await telemetry.until(lambda _: set(who("step_ms")) == set(who("loss")) == hostile)
    for number, flood in enumerate(floods, 10):
        await cell.order(stop_order(number, flood.task_id, grace_ms=0))
        await cell.until(external_events.TaskExited, task_id=flood.task_id)
    lasted_s = time.monotonic() - began_s  # clock: as at the begin
    samples = [from_wire(record.headers, record.value).data for record in broker.records(TELEMETRY)]
    telemetry.samples = [sample for sample in samples if isinstance(sample, TelemetrySampled)]
    assert len(who("step_ms")) <= 4 * (lasted_s + 1), "a second apart"
    assert len(who("loss")) <= 4 * (lasted_s / 5 + 1)
    dropped = [int(found) for found in re.findall(r"(\d+) were not passed on", caplog.text)]
    assert len(dropped) == len(floods), "and visible in the log"
    assert min(dropped) > 0


@pytest.mark.slow  # alone on the machine: `make live`
async def test_others_start_as_fast_as_ever_beside_a_flood(node: Options, cell: Cell) -> None:
    """As a ratio within one run, in which the four scripts take processors as well."""
    numbers = itertools.count(1)
    quiet_s = [await start_and_stop(cell, next(numbers)) for _ in range(5)]
    floods = [
        start_order(number, sys.executable, "-c", FLOODS, gpus=()) for number in itertools.islice(numbers, 4)
    ]
    await cell.order(*floods)
    for flood in floods:
        await cell.until(external_events.TaskStarted, task_id=flood.task_id)
    flooded_s = [await start_and_stop(cell, next(numbers)) for _ in range(15)]
    for flood in floods:
        await cell.order(stop_order(next(numbers), flood.task_id, grace_ms=0))
        await cell.until(external_events.TaskExited, task_id=flood.task_id)
    assert statistics.median(flooded_s) <= 3 * statistics.median(quiet_s) + 1


async def start_and_stop(cell: Cell, number: int) -> float:
    """How long a task takes from its order to the report of its exit, s."""
    began_s = time.monotonic()  # clock: a ratio, alone on the machine
    await cell.order(start_order(number, "true", task_id=f"other-{number}.1.0"))
    await cell.until(external_events.TaskExited, task_id=f"other-{number}.1.0")
    return time.monotonic() - began_s  # clock: as at the begin
