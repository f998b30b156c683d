"""Pre-scheduling on a node-reporter with real processes: a task launches while another one has its GPU, and
trains when that one is proven dead."""

import errno
import os
import sys
from pathlib import Path

import pytest

from penstock.model.decisions.orders import StartTask
from penstock.model.inputs import external_events
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.limits.cgroups import GPU_MAJOR, Cgroups
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, ours, start_order, stop_order, working
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left

SCRIPT = """
import sys, time
from penstock.sdk.phases import phase
phase("launch")
open(sys.argv[1] + ".launched", "w").close()
phase("train")
open(sys.argv[1] + ".trains", "w").close()
time.sleep(float(sys.argv[2]))
"""


def script(token: int, mark: Path, seconds: float = 0, **more: object) -> StartTask:
    """Leaves a file when it has launched, and one when it trains."""
    return start_order(token, sys.executable, "-c", SCRIPT, str(mark), str(seconds), prelaunch=True, **more)


async def launched(mark: Path) -> None:
    await await_until(mark.with_suffix(".launched").exists, f"{mark.name} to launch")


def starts(cell: Cell, order: StartTask) -> list[external_events.TaskStarted]:
    found = cell.events(external_events.TaskStarted)
    return [event for event in found if event.task_id == order.task_id]  # type: ignore[attr-defined]


async def test_a_task_launches_beside_another_and_trains_after_it(
    node: Options, cell: Cell, tmp_path: Path
) -> None:
    """`a` saves its model; `b`, which is next, loads its data meanwhile. It passes its gate when `a` is
    proven dead, and only then it has started."""
    a, b, mark = start_order(1, "sleep", "600"), script(2, tmp_path / "b"), tmp_path / "b"
    await cell.order(a)
    await cell.until(external_events.TaskStarted, task_id=a.task_id)
    await cell.order(b)
    await launched(mark)
    await cell.order(start_order(4, "true", gpus=(1,)))
    await cell.until(external_events.TaskExited, task_id="job-4.1.0")
    assert not mark.with_suffix(".trains").exists()
    assert not starts(cell, b)
    await cell.order(stop_order(5, a.task_id))
    ended = await cell.until(external_events.TaskExited, task_id=a.task_id)
    began = await cell.until(external_events.TaskStarted, task_id=b.task_id)
    assert (await cell.until(external_events.TaskExited, task_id=b.task_id)).exit_code == 0
    assert began.started_ms < ended.exited_ms == began.opened_ms
    assert mark.with_suffix(".trains").exists()


async def test_a_task_that_waits_at_its_gate_is_stopped(node: Options, cell: Cell, tmp_path: Path) -> None:
    """`a` trains on after all: `b` is given back. It never started, its process is gone, and `a` has not
    noticed."""
    a, b = start_order(1, "sleep", "600"), script(2, tmp_path / "b")
    await cell.order(a)
    running = await cell.until(external_events.TaskStarted, task_id=a.task_id)
    await cell.order(b)
    await launched(tmp_path / "b")
    await cell.order(stop_order(3, b.task_id))
    exited = await cell.until(external_events.TaskExited, task_id=b.task_id)
    assert exited.cause == "stopped"
    assert not starts(cell, b)
    assert not (tmp_path / "b.trains").exists()
    assert [found.pid for found in ours(node, "sleep")] == [running.pid]


async def test_a_reporter_that_dies_meanwhile_opens_no_gate_early_and_none_too_late(
    node: Options, cell: Cell, tmp_path: Path
) -> None:
    """The launcher is killed, and its reporter starts over from the journal, while `b` waits for `a`."""
    a, b = start_order(1, "sleep", "600"), script(2, tmp_path / "b")
    await cell.order(a)
    running = await cell.until(external_events.TaskStarted, task_id=a.task_id)
    await cell.order(b)
    await launched(tmp_path / "b")
    (launcher,) = ours(node, "penstock-launch")
    launcher.kill()
    await cell.until(external_events.NodeJoined, count=2)
    assert not (tmp_path / "b.trains").exists()
    (process,) = [found for found in ours(node, "sleep") if found.pid == running.pid]
    process.kill()
    await cell.until(external_events.TaskExited, task_id=a.task_id)
    assert (await cell.until(external_events.TaskExited, task_id=b.task_id)).exit_code == 0
    assert len(starts(cell, b)) == 1


async def test_one_task_launches_on_a_gpu_and_others_wait(node: Options, cell: Cell, tmp_path: Path) -> None:
    """Of two that are ordered after `a`, the one that does not wait at a gate starts when both before it have
    ended."""
    a, b = start_order(1, "sleep", "600"), script(2, tmp_path / "b", 0.3)
    c = start_order(3, "true", gpus=(0, 1))
    await cell.order(a)
    await cell.until(external_events.TaskStarted, task_id=a.task_id)
    await cell.order(b)
    await launched(tmp_path / "b")
    await cell.order(c)
    await cell.order(stop_order(4, a.task_id))
    last = await cell.until(external_events.TaskExited, task_id=c.task_id)
    order = [event.task_id for event in cell.events(external_events.TaskExited)]  # type: ignore[attr-defined]
    assert order == [a.task_id, b.task_id, c.task_id]
    assert last.exit_code == 0


OPENS = """
import errno, os, sys
from penstock.sdk.phases import phase

def attempt():
    try:
        os.close(os.open(sys.argv[1], os.O_RDWR))
        return "open"
    except OSError as error:
        return errno.errorcode[error.errno]

before = attempt()
open(sys.argv[2] + ".launched", "w").close()
phase("train")
print(before, attempt(), flush=True)
"""


async def test_it_can_open_no_gpu_before(
    options: Options, broker: MemoryBroker, cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a cgroup keeps devices: a GPU's device file, which has no driver here (ENXIO), is refused (EPERM)
    up to the gate."""
    device = tmp_path / "nvidia200"
    try:
        os.mknod(device, 0o20666, os.makedev(GPU_MAJOR, 200))
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        if error.errno != errno.ENXIO:
            pytest.skip(f"device files cannot be made and opened here: {error}")
    minors = {f"VIRTUAL-{NODE}-0": 200, f"VIRTUAL-{NODE}-1": 201}
    given = property(lambda self: minors, lambda self, value: None)
    monkeypatch.setattr(Cgroups, "gpu_minors", given, raising=False)
    if not Cgroups("penstock-test", None).keeps_devices:
        pytest.skip("this process may not make groups of the devices hierarchy")
    a = start_order(1, "sleep", "600")
    b = start_order(2, sys.executable, "-c", OPENS, str(device), str(tmp_path / "b"), prelaunch=True)
    async with working(options, MemoryLog(broker, "n")):
        await cell.order(a)
        await cell.until(external_events.TaskStarted, task_id=a.task_id)
        await cell.order(b)
        await launched(tmp_path / "b")
        await cell.order(stop_order(3, a.task_id))
        await cell.until(external_events.TaskExited, task_id=b.task_id)
    assert log_path(options.log_dir, b.job_id, b.task_id).read_text() == "EPERM ENXIO\n"
