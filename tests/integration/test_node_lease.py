"""The lease that a node enforces on itself: real processes, and a log that cannot be reached."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.clock import boot_s
from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.external_events import NodeJoined, NodeLeft, OrderRefused, TaskExited, TaskStarted
from penstock.model.orders import ProbeNode
from penstock.runtime.settings import Settings
from penstock.runtime.this_machine import boot_id
from penstock.sdk.code_archive import pack
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.gateway.shell import connections
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell import reporter_watch
from penstock_services.node_reporter.shell.reporter_watch import ReporterWatch
from penstock_services.placer.shell.service import run as run_placer
from tests.support import gateway_cell, node_fixtures
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import (
    NODE,
    Cell,
    eventually,
    ours,
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
async def test_without_its_reporter_a_task_ends_with_its_lease(
    dsn: str, options: Options, cell: Cell
) -> None:
    """The reporter was killed and did not come back. The cell will take its tasks for dead: they are."""
    async with reporter_process(options, dsn) as reporter:
        await cell.until(NodeJoined)
        await cell.order(start_order(1, "sleep", "600", lease_ms=LEASE_MS))
        pid = (await cell.until(TaskStarted)).pid
        await reporter.kill()
        began_s = asyncio.get_running_loop().time()
        await eventually(lambda: not psutil.pid_exists(pid))
        assert asyncio.get_running_loop().time() - began_s < 1.25 * LEASE_MS / 1_000 + 1
    async with reporter_process(options, dsn):
        exited = await cell.until(TaskExited)
        joined = await cell.until(NodeJoined, count=2)
    assert (exited.cause, exited.exit_code) == ("lost", None)
    assert "lease" in exited.detail
    assert joined.leases
    assert joined.tasks == ()


def turns(watch: ReporterWatch, seconds: float) -> None:
    """The launcher's loop for so long."""
    poll, until_s = select.poll(), time.monotonic() + seconds
    watch.register(poll)
    while (left_s := until_s - time.monotonic()) > 0:
        waits_ms = [left_s * 1_000, *[ms for ms in [watch.timeout_ms()] if ms is not None]]
        watch.turn({descriptor for descriptor, _ in poll.poll(min(waits_ms))})


def readable(end: socket.socket) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def test_a_reporter_is_asked_after_a_lease_without_contact(
    options: Options, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It renews, and is not asked; its last task has ended, it is asked once and answers; then a task begins and it hangs."""
    monkeypatch.setattr(reporter_watch, "MIN_PATIENCE_S", 0.3)
    options.state_dir.mkdir(mode=0o700)
    path = options.state_dir / "lease"
    reporter = subprocess.Popen(["sleep", "600"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.write_text(f"{boot_s() + 1.5} {boot_id()} 0.3")
        watch = ReporterWatch(str(path), os.pidfd_open(reporter.pid), theirs)
        turns(watch, 0.5)
        assert not readable(ours), "asked, though it renews"
        while not readable(ours):
            turns(watch, 0.1)
        assert ours.recv(1) == b"?"
        ours.send(b"!")
        turns(watch, 0.6)
        assert reporter.poll() is None
        assert not readable(ours)
        watch.began()
        while reporter.poll() is None:
            turns(watch, 0.1)
        assert reporter.returncode == -signal.SIGKILL
        assert "did not answer within 0.3 s" in capfd.readouterr().err
        watch.close()
    finally:
        reporter.kill()
        reporter.wait()
        ours.close()


async def until_row(
    cell: gateway_cell.Cell, path: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What the gateway answers once it is so."""
    row: dict[str, Any] = {}
    try:
        async with asyncio.timeout(40):
            while not holds(row := (await cell.http.get(path)).json()):
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{path}: {row}")
    return row


@asynccontextmanager
async def whole_cell(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[gateway_cell.Cell]:
    """Gateway, projector, placer and estimator in this process."""
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 0.5)
    monkeypatch.setenv("PENSTOCK_LEASE_MS", "3000")
    stop, settings = asyncio.Event(), Settings(log_url=dsn, dsn=dsn)
    async with gateway_cell.running(dsn) as cell:
        services = [asyncio.create_task(run(settings, stop)) for run in (run_placer, run_estimator)]
        try:
            yield cell
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*services), 20)


@pytest.mark.postgres
async def test_a_reporter_that_hangs_is_ended_and_its_node_suspected(
    dsn: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in a driver, as if by SIGSTOP, with one task that runs and one that ends meanwhile. Neither may show as running for ever."""
    async with (
        whole_cell(dsn, monkeypatch) as cell,
        reporter_process(options, dsn, "--gateway", cell.url) as reporter,
    ):
        await until_row(cell, "/v1/nodes/n1", lambda row: bool(row.get("connected")))
        resources = {"gpus": 1, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 64}
        jobs = []
        for seconds in ("600", "601"):
            spec = {"command": ["sleep", seconds], "resources": resources}
            jobs.append((await cell.http.post("/v1/jobs", json=spec)).json()["job_id"])
        for job_id in jobs:
            await until_row(cell, f"/v1/jobs/{job_id}", lambda row: row["status"] == "running")
        os.kill(reporter.pid, signal.SIGSTOP)
        [ended] = [process for process in ours(options, "sleep") if process.cmdline() == ["sleep", "601"]]
        ended.kill()
        await reporter.killed()
        assert not ours(options, "sleep")
        answers = [
            until_row(cell, f"/v1/jobs/{job_id}", lambda row: bool(row["unproven"])) for job_id in jobs
        ]
        for row in await asyncio.gather(*answers):
            assert row["status"] == "running"
            assert row["unproven"][0]["node_id"] == "n1"
        assert (await cell.http.get("/v1/nodes/n1")).json()["status"] == "suspect"


async def test_a_lease_is_renewed_while_the_log_is_there_and_not_without(
    options: Options, broker: MemoryBroker
) -> None:
    """A task outlives its lease twice. Then the network is cut: it gets SIGTERM and the rest of the lease to save its work."""
    cell, wire = Cell(MemoryLog(broker, "placer")), Wire(broker, "node-reporter")
    script = "trap 'exit 3' TERM; while :; do sleep 0.05; done"
    async with working(options, wire):
        await cell.order(start_order(1, "sh", "-c", script, lease_ms=3_000))
        await cell.until(TaskStarted)
        await asyncio.sleep(7.0)
        assert not cell.events(TaskExited)
        wire.cut = True
        exited = await cell.until(TaskExited)
        assert (exited.cause, exited.exit_code) == ("stopped", 3)
        await cell.order(start_order(2, "true", lease_ms=3_000))
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


async def test_the_first_task_of_a_node_may_bring_its_code(
    options: Options, broker: MemoryBroker, tmp_path: Path
) -> None:
    """It is fetched and unpacked while the node has had no contact yet: nothing has begun whose lease could have lapsed."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.sh").write_text("exit 3")
    packed = pack(project)
    stored = tmp_path / "code" / "shared" / packed.sha256
    stored.parent.mkdir(parents=True)
    stored.write_bytes(packed.data)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(replace(options, code_dir=tmp_path / "code"), Wire(broker, "node-reporter")):
        await cell.order(start_order(1, "sh", "run.sh", code=packed.sha256, lease_ms=60_000))
        exited = await cell.until(TaskExited)
    assert (exited.cause, exited.exit_code) == ("exited", 3)
    assert len(cell.events(NodeJoined)) == 1


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
