"""Cores of real processes are changed while they run: every thread of all of them, seen in what the task
itself measures."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infra.codegen.schemas import ROOT
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import SetBandwidth, SetCores
from penstock.model.inputs import external_events
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.limits.cgroups import QUOTA_V1, QUOTA_V2
from penstock_services.node_reporter.shell.limits.cpu_quota import PERIOD_US
from penstock_services.node_reporter.shell.node import Node
from penstock_services.node_reporter.shell.process.processes import below
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, printed, start_order, stop_order, working
from tests.support.processes import processor_s
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left

USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores to move between")

FAMILY = """
import os, subprocess, sys, threading, time
if os.fork() == 0:                       # a daemon: in a session of its own, its parent gone
    os.setsid()
    if os.fork():
        os._exit(0)
for _ in range(20):
    threading.Thread(target=time.sleep, args=(600,)).start()
while True:                              # threads that come and go meanwhile
    thread = threading.Thread(target=time.sleep, args=(0.001,))
    thread.start()
    thread.join()
"""


def affinities(pids: list[int]) -> set[frozenset[int]]:
    """Of all threads that live now."""
    found: set[frozenset[int]] = set()
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                found.add(frozenset(os.sched_getaffinity(int(thread))))
            except ProcessLookupError:
                continue
    return found


def shim_of(pid: int) -> int:
    """The parent of a task's program."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@two_cores
async def test_every_thread_of_every_process_moves(node: Options, cell: Cell) -> None:
    """A loader forked workers, one became a daemon, threads come and go: none of them stays on the old
    cores."""
    await cell.order(start_order(1, sys.executable, "-c", FAMILY, cores=(0, 1)))
    started = await cell.until(external_events.TaskStarted)
    shim = shim_of(started.pid)
    threads = Path(f"/proc/{started.pid}/task")
    await await_until(
        lambda: len(list(below(shim))) >= 2 and len(os.listdir(threads)) >= 20, "a daemon and twenty threads"
    )
    await cell.order(SetCores(token=2, node_id=NODE, task_id=started.task_id, cores=(1,)))
    adjusted = await cell.until(TaskAdjusted)
    assert (adjusted.order_token, adjusted.what, adjusted.detail) == (2, "cores", "")
    assert adjusted.enforced in ("cpuset", "affinity")
    assert affinities(list(below(shim))) == {frozenset({USABLE[1]})}
    await cell.order(SetCores(token=3, node_id=NODE, task_id=started.task_id, cores=(0, 1)))
    await cell.until(TaskAdjusted, count=2)
    assert affinities(list(below(shim))) == {frozenset(USABLE[:2])}
    await cell.order(stop_order(4, started.task_id, grace_ms=0))
    await cell.until(external_events.TaskExited)


RESIZES = """
import os, sys, time
from penstock.sdk.cores import on_cores
from penstock.sdk.progress import progress
sizes, done = [], 0
on_cores(lambda size: (sizes.append(size), print(size, flush=True)))
while len(sizes) < 3:
    time.sleep(0.02)
    done += 1
    progress(done)
sys.exit(0 if sizes == [2, 1, 2] else 3)
"""


@two_cores
async def test_a_script_is_told_of_its_cores_between_two_iterations(node: Options, cell: Cell) -> None:
    """A pool of as many threads as cores: one core is taken away, and given back."""
    env = {"PYTHONPATH": str(ROOT / "libs")}
    await cell.order(start_order(1, sys.executable, "-c", RESIZES, cores=(0, 1), env=env))
    started = await cell.until(external_events.TaskStarted)
    await cell.until(external_events.StepsMeasured)
    for token, chosen in ((2, (1,)), (3, (0, 1))):
        await cell.order(SetCores(token=token, node_id=NODE, task_id=started.task_id, cores=chosen))
        await cell.until(TaskAdjusted, count=token - 1)
        await await_until(
            lambda token=token: len(printed(node, "job-1", started.task_id).split()) == token,
            "the script to be told",
        )
    exited = await cell.until(external_events.TaskExited)
    assert exited.exit_code == 0


async def test_what_this_machine_cannot_do_is_answered(node: Options, cell: Cell) -> None:
    """It has no such core, and perhaps no means to cap bandwidth: the cell learns it, and the task runs on as
    before."""
    joined = await cell.until(external_events.NodeJoined)
    await cell.order(start_order(1, "sleep", "600"))
    started = await cell.until(external_events.TaskStarted)
    cap = SetBandwidth(token=2, node_id=NODE, task_id=started.task_id, memory_bandwidth_percent=20)
    await cell.order(cap)
    answered = await cell.until(TaskAdjusted)
    assert (answered.what, answered.enforced == "") == (
        "memory_bandwidth",
        joined.node.bandwidth_cap == "none",
    )
    assert answered.enforced or "no resctrl" in answered.detail
    await cell.order(SetCores(token=2, node_id=NODE, task_id=started.task_id, cores=(0,)))
    await cell.until(TaskAdjusted, count=2)
    assert len(cell.ids(TaskAdjusted)) == 2, "of one token, as after a loss of records"
    await cell.order(SetCores(token=3, node_id=NODE, task_id=started.task_id, cores=(0, 4)))
    count = 3
    while (refused := await cell.until(TaskAdjusted, count=count)).order_token != 3:
        count += 1  # one of token 2 again, since its report was not acknowledged
    assert refused.detail == "not on this node: cores 4; it has 4"
    assert os.sched_getaffinity(started.pid) == {USABLE[0]}
    await cell.order(stop_order(4, started.task_id))
    await cell.until(external_events.TaskExited)


SPINS = "import os\nos.fork()\nwhile True: pass"
# processor time of two processes is counted in ticks of 10 ms, and a quota is given to cores in slices of 5
# ms
TICKS_S = 0.1


async def used_by(shim: int) -> tuple[float, float]:
    """Processor time of all processes of this task during a second or, on a busy machine, more, s; and that
    time, s."""
    began_s = time.monotonic()  # clock: the longest time in which it may have been used
    before_s = processor_s(shim)
    await asyncio.sleep(1)  # clock: the cap is a part of the time that passes, however much
    used_s = processor_s(shim) - before_s
    lasted_s = time.monotonic() - began_s  # clock: as at the begin
    return used_s, lasted_s


def quota(pid: int) -> float | None:
    """The kernel's, in cores, of a process's groups; None: there is none."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "cpu" in controllers.split(",") and "@" in group:
            return int(Path(f"/sys/fs/cgroup/cpu/{group}/{QUOTA_V1}").read_text()) / PERIOD_US
        v2 = Path(f"/sys/fs/cgroup/{group}/{QUOTA_V2}")
        if not controllers and v2.exists():
            limit, period = v2.read_text().split()
            return None if limit == "max" else int(limit) / int(period)
    return None


@two_cores
async def test_a_cap_limits_a_task_to_a_part_of_its_cores_time_and_follows_its_cores(
    node: Options, cell: Cell
) -> None:
    """No resctrl: a job that computes on one core gets a fifth of its time. An operator gives it two cores,
    of both of which it then gets a fifth."""
    joined = await cell.until(external_events.NodeJoined)
    if joined.node.bandwidth_cap != "cpu_quota":
        pytest.skip(
            "tasks can write the files of cgroups here, or there is no `cpu` controller, or there is resctrl"
        )
    await cell.order(start_order(1, sys.executable, "-c", SPINS, cores=(0,)))
    started = await cell.until(external_events.TaskStarted)
    shim = shim_of(started.pid)
    await await_until(lambda: len(list(below(shim))) == 2, "both processes")
    await cell.order(
        SetBandwidth(token=2, node_id=NODE, task_id=started.task_id, memory_bandwidth_percent=20)
    )
    adjusted = await cell.until(TaskAdjusted)
    assert (adjusted.what, adjusted.enforced) == ("memory_bandwidth", "cpu_quota")
    for token, cores in ((3, (0, 1)), (4, (1,))):
        await cell.order(SetCores(token=token, node_id=NODE, task_id=started.task_id, cores=cores))
        adjusted = await cell.until(TaskAdjusted, count=token - 1)
        capped = 0.2 * len(cores)
        await await_until(
            lambda capped=capped: quota(started.pid) == capped,  # type: ignore[misc]
            lambda: quota(started.pid),
        )
        used_s, lasted_s = await used_by(shim)
        assert used_s <= capped * (lasted_s + PERIOD_US / 1e6) + TICKS_S, "at most its part"
    lift = SetBandwidth(token=5, node_id=NODE, task_id=started.task_id, memory_bandwidth_percent=None)
    await cell.order(lift)
    lifted = await cell.until(TaskAdjusted, count=4)
    assert (lifted.enforced, lifted.detail) == ("cpu_quota", "")
    assert quota(started.pid) is None
    await cell.order(stop_order(6, started.task_id, grace_ms=0))
    await cell.until(external_events.TaskExited)


@two_cores
async def test_a_reporter_that_dies_between_journal_and_deed_does_it_at_its_next_start(
    options: Options, broker: MemoryBroker, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 right after the order was written down: the task would keep its old cores for ever."""
    act = Node._act

    def dies(self: Node, decision: Any) -> None:
        if type(decision).__name__ != "SetAffinity":
            act(self, decision)

    monkeypatch.setattr(Node, "_act", dies)
    async with working(options, MemoryLog(broker, "n")):
        await cell.order(start_order(1, "sleep", "600", cores=(0, 1)))
        started = await cell.until(external_events.TaskStarted)
        await cell.order(SetCores(token=2, node_id=NODE, task_id=started.task_id, cores=(1,)))
        await cell.order(start_order(3, "true", gpus=(1,)))
        await cell.until(external_events.TaskExited, task_id="job-3.1.0")
    assert os.sched_getaffinity(started.pid) == set(USABLE[:2])
    monkeypatch.setattr(Node, "_act", act)
    async with working(options, MemoryLog(broker, "n")):
        adjusted = await cell.until(TaskAdjusted)
        assert (adjusted.order_token, adjusted.detail) == (2, "")
        assert os.sched_getaffinity(started.pid) == {USABLE[1]}
        await cell.order(stop_order(4, started.task_id))
        await cell.until(external_events.TaskExited, task_id=started.task_id)
