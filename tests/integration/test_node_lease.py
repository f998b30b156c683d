"""The lease that a node enforces on itself: real processes, and a log that cannot be reached."""

import asyncio
import os
import signal

import psutil
import pytest

from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.external_events import NodeJoined, TaskExited, TaskStarted
from penstock.model.orders import ProbeNode
from penstock_services.node_reporter.options import Options
from tests.support import node_fixtures
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import (
    NODE,
    TOPICS,
    Cell,
    eventually,
    reporter_process,
    start_order,
    working,
)

LEASE_MS = 1_500


options, nothing_left = node_fixtures.options, node_fixtures.nothing_left
cell = node_fixtures.embedded_cell


class Wire(MemoryLog):
    """A log that can be cut off: what is asked of it fails, and what is read does not come."""

    cut = False

    async def end_offsets(self, partitions: object) -> dict[Partition, int]:
        if self.cut:
            raise LogError("cut off")
        return await super().end_offsets(partitions)  # type: ignore[arg-type]


@pytest.mark.postgres
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_without_its_reporter_a_task_ends_with_its_lease(
    number: signal.Signals, dsn: str, options: Options, cell: Cell
) -> None:
    """The reporter hangs in a driver, or was killed and never came back. The cell will take its tasks for dead: they are."""
    async with reporter_process(options, dsn) as reporter:
        await cell.order(start_order(1, "sleep", "600", lease_ms=LEASE_MS))
        pid = (await cell.until(TaskStarted)).pid
        os.kill(reporter.pid, number)
        began_s = asyncio.get_running_loop().time()
        await eventually(lambda: not psutil.pid_exists(pid))
        assert asyncio.get_running_loop().time() - began_s < 1.25 * LEASE_MS / 1_000 + 1
        if number is signal.SIGSTOP:
            os.kill(reporter.pid, signal.SIGCONT)
            exited = await cell.until(TaskExited)
            joined = await cell.until(NodeJoined, count=2)
    if number is signal.SIGKILL:
        async with reporter_process(options, dsn):
            exited = await cell.until(TaskExited)
            joined = await cell.until(NodeJoined, count=2)
    assert (exited.cause, exited.exit_code) == ("lost", None)
    assert "lease" in exited.detail
    assert joined.leases
    assert joined.tasks == ()


async def test_a_lease_is_renewed_while_the_log_is_there_and_not_without(options: Options) -> None:
    """A task outlives its lease many times. Then the network is cut: it gets SIGTERM and the rest of the lease to save its work."""
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell, wire = Cell(MemoryLog(broker, "placer")), Wire(broker, "node-reporter")
    script = "trap 'exit 3' TERM; while :; do sleep 0.05; done"
    async with working(options, wire):
        await cell.order(start_order(1, "sh", "-c", script, lease_ms=600))
        await cell.until(TaskStarted)
        await asyncio.sleep(2.0)
        assert not cell.events(TaskExited)
        wire.cut = True
        exited = await cell.until(TaskExited)
        assert (exited.cause, exited.exit_code) == ("stopped", 3)
        await cell.order(start_order(2, "true", lease_ms=600))
        wire.cut = False
        assert (await cell.until(TaskExited, task_id="job-2.1.0")).exit_code == 0


async def test_a_probe_is_answered_by_a_joining_and_tasks_run_on(options: Options) -> None:
    """The cell suspects a node that lives."""
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, MemoryLog(broker, "node-reporter")):
        first = await cell.until(NodeJoined)
        await cell.order(start_order(1, "sleep", "600", lease_ms=60_000))
        await cell.until(TaskStarted)
        await cell.order(ProbeNode(token=2, node_id=NODE, incarnation=first.incarnation))
        second = await cell.until(NodeJoined, count=2)
        assert second.incarnation > first.incarnation
        assert [task.task_id for task in second.tasks] == ["job-1.1.0"]
        await cell.order(ProbeNode(token=3, node_id=NODE, incarnation=first.incarnation))
        await cell.order(start_order(4, "true", gpus=(1,), lease_ms=60_000))
        await cell.until(TaskExited)
        assert len(cell.events(NodeJoined)) == 2, "a probe of an earlier joining is answered"
