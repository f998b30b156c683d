"""Jobs that mean harm, on a real node-reporter with real processes: each is contained, or the node says that it cannot be.

Every attack is bounded: in processes, bytes and seconds, so that a test that fails harms no machine.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.model import external_events
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.linux import read_record
from penstock_services.node_reporter.shell.ports import Started
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import NODE, TOPICS, Cell, eventually, start_order, working

SLEEP_S = 25.0
"""An escaped process ends by itself after so long; larger than any wait of these tests."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        NODE, tmp_path / "state", tmp_path / "logs", virtual_gpus=2, cores=4, host_memory_mib=8_192
    )


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    broker.create(TOPICS)
    return broker


@pytest.fixture
async def cell(broker: MemoryBroker) -> Cell:
    return Cell(MemoryLog(broker, "placer"))


@pytest.fixture
async def node(options: Options, broker: MemoryBroker) -> AsyncIterator[Options]:
    async with working(options, MemoryLog(broker, "node-reporter")):
        yield options


def escaped() -> list[psutil.Process]:
    """Living processes that the attacks left on the machine, known by the odd length of their sleep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", str(SLEEP_S)] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The machine stays clean even when a test fails."""
    yield
    for process in escaped():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def attack(script: str) -> tuple[str, ...]:
    """A job's command: Python with these lines, and `escape`: a process in a session of its own, with nothing of ours."""
    tools = f"""
import os, signal, sys, time
def escape():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            os.execve("/bin/sleep", ["sleep", "{SLEEP_S}"], {{}})
        os._exit(0)
    os.wait()
"""
    return (sys.executable, "-c", tools + script)


async def test_what_a_job_left_behind_is_dead_before_its_killed_shim_is_reported(
    node: Options, cell: Cell
) -> None:
    """A job escapes with a double fork, a session of its own and an empty environment; then the OOM killer
    picks its shim. The node reports the GPU as free; a process that still holds it there would be a second user."""
    await cell.order(start_order(1, *attack("escape(); time.sleep(30)")))
    await cell.until(external_events.TaskStarted)
    await eventually(lambda: len(escaped()) == 1)
    started = read_record(node.state_dir / "tasks/job-1.1.0@1/started.json", Started)
    assert started is not None
    os.kill(started.shim, signal.SIGKILL)
    exited = await cell.until(external_events.TaskExited)
    assert escaped() == []
    assert (exited.cause, exited.exit_code) == ("lost", None)


async def test_a_forged_exit_record_is_not_believed(node: Options, cell: Cell) -> None:
    """A job writes down its own success where it finds the shim's records, and then kills the shim."""
    forged = """
import json
from pathlib import Path
folder = Path.cwd().parent
record = dict(task_id="job-1.1.0", token=1, started_ms=1, exited_ms=2, exit_code=0, signal=None, cpu_ms=0, max_rss_kib=0)
try:
    (folder / "exit.json").write_text(json.dumps(record))
finally:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.3)
    os._exit(7)
"""
    await cell.order(start_order(1, *attack(forged)))
    exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.exit_code) == ("exited", 7)
