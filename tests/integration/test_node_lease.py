"""The lease that a node enforces on itself: real processes, and a log that cannot be reached."""

import asyncio
import os
import signal
from dataclasses import replace

import psutil
import pytest

from penstock.clock import boot_s
from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.external_events import NodeJoined, NodeLeft, OrderRefused, TaskExited, TaskStarted
from penstock.model.orders import ProbeNode
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.inventory import boot_id
from tests.support import node_fixtures
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import (
    NODE,
    Cell,
    eventually,
    reporter_process,
    start_order,
    working,
)

LEASE_MS = 1_500


options, broker, nothing_left = node_fixtures.options, node_fixtures.broker, node_fixtures.nothing_left
cell = node_fixtures.embedded_cell


class Wire(MemoryLog):
    """A log that can be cut off: what is asked of it fails, and what is read does not come."""

    cut = False

    async def end_offsets(self, partitions: object) -> dict[Partition, int]:
        await asyncio.sleep(0.01)
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
        first = await cell.until(NodeJoined)
        await cell.order(start_order(1, "sleep", "600", lease_ms=LEASE_MS))
        pid = (await cell.until(TaskStarted)).pid
        os.kill(reporter.pid, number)
        began_s = asyncio.get_running_loop().time()
        await eventually(lambda: not psutil.pid_exists(pid))
        assert asyncio.get_running_loop().time() - began_s < 1.25 * LEASE_MS / 1_000 + 1
        if number is signal.SIGSTOP:
            await cell.order(ProbeNode(token=2, node_id=NODE, incarnation=first.incarnation))
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


async def test_a_lease_is_renewed_while_the_log_is_there_and_not_without(
    options: Options, broker: MemoryBroker
) -> None:
    """A task outlives its lease many times. Then the network is cut: it gets SIGTERM and the rest of the lease to save its work."""
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


async def test_a_probe_is_answered_by_a_joining_and_tasks_run_on(
    options: Options, broker: MemoryBroker
) -> None:
    """The cell suspects a node that lives."""
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


def note_contact(options: Options, ago_s: float) -> None:
    """As a reporter left it that had contact with the log so long ago."""
    options.state_dir.mkdir(mode=0o700)
    (options.state_dir / "lease").write_text(f"{boot_s() - ago_s} {boot_id()}")


async def test_a_task_begins_after_nine_idle_minutes_of_ten(options: Options, broker: MemoryBroker) -> None:
    """A node without tasks asks nothing. Its last contact is so old that a running task would be stopped now."""
    note_contact(options, ago_s=540)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, Wire(broker, "node-reporter")):
        await cell.order(start_order(1, "sleep", "0.2", lease_ms=600_000))
        exited = await cell.until(TaskExited)
    assert (exited.cause, exited.exit_code) == ("exited", 0)


async def test_a_shorter_lease_of_a_new_task_stops_no_other(options: Options, broker: MemoryBroker) -> None:
    """An operator shortens the lease. The next task waits for contact; what runs has time by its own lease."""
    note_contact(options, ago_s=10)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, Wire(broker, "node-reporter")):
        await cell.order(start_order(1, "sleep", "600", lease_ms=60_000))
        await cell.until(TaskStarted)
        await cell.order(start_order(2, "true", gpus=(1,), lease_ms=8_000))
        exited = await cell.until(TaskExited)
        assert (exited.task_id, exited.cause, exited.exit_code) == ("job-2.1.0", "exited", 0)
        assert len(cell.events(NodeJoined)) == 1


async def test_a_drained_node_leaves_while_a_task_waits_for_contact(
    options: Options, broker: MemoryBroker
) -> None:
    """The log takes appends and answers no question, and an operator drains the node: the task never begins."""
    cell, wire = Cell(MemoryLog(broker, "placer")), Wire(broker, "node-reporter")
    async with working(replace(options, drain=True), wire) as stop:
        wire.cut = True
        await cell.order(start_order(1, "true", lease_ms=60_000), start_order(2, "true", lease_ms=60_000))
        await asyncio.sleep(0.2)
        stop.set()
        for task_id in ("job-1.1.0", "job-2.1.0"):
            exited = await cell.until(TaskExited, OrderRefused, task_id=task_id)
            assert getattr(exited, "cause", "stopped") == "stopped"
        await cell.until(NodeLeft)
    assert not cell.events(TaskStarted)
