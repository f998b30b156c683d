"""Cores and memory of real tasks, as their node enforces them."""

import os
import signal
import sys

import msgspec
import pytest

from penstock.model.decisions.orders import SetCores
from penstock.model.inputs import external_events
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.limits import cgroups
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, printed, start_order, stop_order, working
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left


async def test_cores_of_a_running_task_are_changed(node: Options, cell: Cell) -> None:
    await cell.order(start_order(1, "sleep", "600", cores=(0, 1)))
    started = await cell.until(external_events.TaskStarted)
    await cell.order(SetCores(token=2, node_id=NODE, task_id=started.task_id, cores=(1,)))
    usable = sorted(os.sched_getaffinity(0))
    await await_until(lambda: os.sched_getaffinity(started.pid) == {usable[1 % len(usable)]}, "other cores")
    await cell.order(stop_order(3, started.task_id))
    exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.signal) == ("stopped", signal.SIGTERM)


async def test_without_a_cgroup_a_memory_cap_is_each_process_own(
    options: Options, broker: MemoryBroker, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_DATA: the allocation fails inside the program."""
    monkeypatch.setattr(cgroups, "own_groups", lambda *_: {})
    hungry = "x = bytearray(3 << 30); print('had it')"
    async with working(options, MemoryLog(broker, "n")):
        await cell.order(start_order(1, sys.executable, "-c", hungry, host_memory_mib=256))
        exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.exit_code, exited.exhausted) == ("exited", 1, "host_memory")
    assert exited.detail == "MemoryError in its last lines"
    assert "MemoryError" in log_path(options.log_dir, "job-1", "job-1.1.0").read_text()


async def test_a_memory_cap_is_of_all_processes_together(node: Options, cell: Cell) -> None:
    """A data loader's workers: each is within the promise, together they are not; the kernel counts them as
    one."""
    if not cgroups.Cgroups(NODE, None).caps_memory:
        pytest.skip("this machine delegates no memory cgroup")
    go = node.state_dir.parent / "go"
    program = (
        "import os, sys, time; x = bytes(1) * (70 << 20)\nwhile not os.path.exists(sys.argv[1]): "
        "time.sleep(0.05)"
    )
    worker = f"{sys.executable} -c '{program}'"
    strict = f"for i in 1 2 3; do ({worker} {go}1 || kill -9 $$) & done; wait"
    lenient = f"for i in 1 2 3; do ({worker} {go}2 || touch {go}2) & done; wait; exit 0"
    await cell.order(start_order(1, "sh", "-c", strict, host_memory_mib=150))
    exited = await cell.until(external_events.TaskExited, task_id="job-1.1.0")
    assert (exited.cause, exited.signal, exited.exhausted) == ("out_of_memory", 9, "host_memory")
    await cell.order(start_order(2, "sh", "-c", lenient, host_memory_mib=150))
    exited = await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    assert (exited.cause, exited.exit_code) == ("exited", 0), "it went on without one of them, and succeeded"
    assert exited.exhausted == ""
    order = start_order(3, "sh", "-c", f"cat /proc/self/oom_score_adj; {worker} /", host_memory_mib=30)
    await cell.order(
        msgspec.structs.replace(order, place=msgspec.structs.replace(order.place, host_memory_cap_mib=150))
    )
    exited = await cell.until(external_events.TaskExited, task_id="job-3.1.0")
    assert exited.exit_code == 0, "its cap is more than what it was promised"
    assert printed(node, "job-3", "job-3.1.0").startswith("500"), (
        "where the machine runs short, it is ended before others"
    )
