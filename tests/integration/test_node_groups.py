"""Groups on a node-reporter with real processes: members live on one GPU at once, a stranger waits, and nobody is restarted."""

import asyncio
import os

import psutil

from penstock.model import external_events
from penstock.model.orders import Companion, StartTask
from penstock_services.node_reporter.options import Options
from tests.support import node_fixtures
from tests.support.node_cell import Cell, eventually, ours, start_order, stop_order

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left


def beside(token: int, *members: StartTask, seconds: int) -> StartTask:
    companions = tuple(Companion(task_id=order.task_id, token=order.token) for order in members)
    return start_order(token, "sleep", str(seconds), companions=companions)


async def started(cell: Cell, order: StartTask) -> psutil.Process:
    found = await cell.until(external_events.TaskStarted, task_id=order.task_id)
    return psutil.Process(found.pid)


async def test_members_live_on_one_gpu_and_a_stranger_waits(node: Options, cell: Cell) -> None:
    """`a` trains; `b` joins it, and its reporter starts over from the journal; `a` is stopped, `c` joins `b`. A stranger that was ordered
    meanwhile starts when all of them are gone, and `b` has had one process all the time."""
    a = start_order(1, "sleep", "600")
    b = beside(2, a, seconds=601)
    stranger = start_order(4, "true", task_id="stranger.1.w0", job_id="stranger")
    await cell.order(a)
    first = await started(cell, a)
    await cell.order(b)
    second = await started(cell, b)
    assert first.is_running()
    assert os.sched_getaffinity(first.pid) == os.sched_getaffinity(second.pid)
    (launcher,) = [found for found in ours(node, "penstock-launch") if found.ppid() == os.getpid()]
    launcher.kill()
    await cell.until(external_events.NodeJoined, count=2)
    c = beside(3, a, b, seconds=602)
    await cell.order(c)
    third = await started(cell, c)
    await cell.order(stranger)
    await cell.order(stop_order(5, a.task_id))
    exited = await cell.until(external_events.TaskExited, task_id=a.task_id)
    assert exited.cause == "stopped"
    await asyncio.sleep(0.3)
    assert second.is_running()
    assert third.is_running()
    assert not [
        found for found in cell.events(external_events.TaskStarted) if found.task_id == stranger.task_id
    ]  # type: ignore[attr-defined]
    third.kill()
    await cell.until(external_events.TaskExited, task_id=c.task_id)
    assert second.is_running()
    second.kill()
    await cell.until(external_events.TaskExited, task_id=b.task_id)
    assert (await cell.until(external_events.TaskExited, task_id=stranger.task_id)).exit_code == 0
    await eventually(lambda: not ours(node, "sleep"))
