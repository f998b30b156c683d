"""The lease that a node enforces on itself: real processes, and a log that cannot be reached."""

import asyncio
import itertools
import os
import select
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.clock import boot_s
from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.decisions.orders import ProbeNode
from penstock.model.inputs.external_events import NodeJoined, NodeLeft, OrderRefused, TaskExited, TaskStarted
from penstock.runtime.settings import Settings
from penstock.runtime.this_machine import boot_id
from penstock.sdk.code_archive import pack
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.gateway.shell.routes import connections
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.watchdogs import lease_watch, reporter_watch
from penstock_services.node_reporter.shell.watchdogs.lease import STOP_AFTER
from penstock_services.node_reporter.shell.watchdogs.lease_watch import LeaseWatch
from penstock_services.node_reporter.shell.watchdogs.reporter_watch import ReporterWatch
from penstock_services.placer.shell.service import run as run_placer
from tests.support.gateway import gateway_cell
from tests.support.installation.services import while_running
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, ours, reporter_process, start_order, working
from tests.support.waiting import await_until

LEASE_MS = 1_500


options, broker, nothing_left = node_fixtures.options, node_fixtures.broker, node_fixtures.nothing_left
cell = node_fixtures.embedded_cell


class Wire(MemoryLog):
    """A log that can be cut off: what is asked of it fails, and what is read does not come."""

    cut = False
    refused = 0
    """Questions while it was cut off."""

    async def end_offsets(self, partitions: object) -> dict[Partition, int]:
        await asyncio.sleep(0.01)  # clock: as a network takes; nothing depends on how long
        if self.cut:
            self.refused += 1
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
        await await_until(lambda: not psutil.pid_exists(pid), "the end of its lease")
    async with reporter_process(options, dsn):
        exited = await cell.until(TaskExited)
        joined = await cell.until(NodeJoined, count=2)
    assert (exited.cause, exited.exit_code) == ("lost", None)
    assert "lease" in exited.detail
    assert joined.leases
    assert joined.tasks == ()


def test_a_shim_waits_for_the_end_of_the_lease_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reporter has renewed the lease twice since the task was ordered, and then has no contact any
    more."""
    clock, timer, path = Clock(), Timer(), tmp_path / "lease"
    monkeypatch.setattr(lease_watch, "boot_s", clock.now_s)
    monkeypatch.setattr(lease_watch, "BootTimer", lambda: timer)
    watch = LeaseWatch(str(path), 30.0, 130.0)
    assert timer.until_s == 130.0
    for contact_s in (110.0, 125.5):
        path.write_text(f"{contact_s} {boot_id()} 30")
        assert timer.until_s is not None
        clock.s = timer.until_s
        assert not watch.over()
        assert timer.until_s == contact_s + 30
    clock.s = timer.until_s
    assert watch.over()
    os.close(timer.fd)


class Clock:
    """Instead of the machine's: it stands still."""

    s = 100.0

    def now_s(self) -> float:
        return self.s


class Timer:
    """Instead of one of the boot-time clock: it is never readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.until_s: float | None = None

    def set(self, until_s: float | None) -> None:
        self.until_s = until_s


def turns(watch: ReporterWatch, clock: Clock, timer: Timer, question: socket.socket, seconds: float) -> None:
    """The launcher's loop for so long."""
    until_s = clock.s + seconds
    while True:
        ready = {question.fileno()} if readable(question) else set()
        if timer.until_s is not None and timer.until_s <= clock.s:
            ready.add(timer.fd)
        watch.turn(ready)
        left_ms = watch.timeout_ms()
        due_s = [timer.until_s, None if left_ms is None else clock.s + max(left_ms, 1) / 1_000]
        if not ready and clock.s >= until_s:
            return
        clock.s = max(clock.s, min([until_s, *(each for each in due_s if each is not None)]))


def readable(end: socket.socket) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def test_a_reporter_is_asked_after_a_lease_without_contact(
    options: Options, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It renews, and is not asked; its last task has ended, it is asked once and answers; then a task begins
    and it hangs."""
    clock, timer = Clock(), Timer()
    monkeypatch.setattr(reporter_watch, "boot_s", clock.now_s)
    monkeypatch.setattr(reporter_watch, "BootTimer", lambda: timer)
    monkeypatch.setattr(reporter_watch, "time", SimpleNamespace(monotonic=clock.now_s))
    options.state_dir.mkdir(mode=0o700)
    path = options.state_dir / "lease"
    reporter = subprocess.Popen(["sleep", "600"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.write_text(f"{clock.s} {boot_id()} 20")
        watch = ReporterWatch(str(path), os.pidfd_open(reporter.pid), theirs)
        turns(watch, clock, timer, theirs, 15)
        path.write_text(f"{clock.s} {boot_id()} 20")
        turns(watch, clock, timer, theirs, 15)
        assert not readable(ours), "asked, though it has renewed"
        turns(watch, clock, timer, theirs, 6)
        assert ours.recv(1) == b"?"
        ours.send(b"!")
        turns(watch, clock, timer, theirs, 60)
        assert capfd.readouterr().err == "", "killed, though it has answered"
        assert not readable(ours)
        watch.began()
        turns(watch, clock, timer, theirs, 21)
        assert capfd.readouterr().err == "", "it has two seconds to answer"
        turns(watch, clock, timer, theirs, 2)
        assert reporter.wait() == -signal.SIGKILL
        assert "did not answer within 2 s" in capfd.readouterr().err
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

    async def look() -> bool:
        row.clear()
        row.update((await cell.http.get(path)).json())
        return holds(row)

    await await_until(look, lambda: f"{path}: {row}")
    return row


@asynccontextmanager
async def whole_cell(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[gateway_cell.Cell]:
    """Gateway, projector, placer and estimator in this process."""
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 0.5)
    monkeypatch.setenv("PENSTOCK_LEASE_MS", "3000")
    stop, settings = asyncio.Event(), Settings(log_url=dsn, dsn=dsn)
    async with (
        gateway_cell.running(dsn) as cell,
        while_running(run_placer(settings, stop), stop),
        while_running(run_estimator(settings, stop), stop),
    ):
        yield cell


@pytest.mark.postgres
async def test_a_reporter_that_hangs_is_ended_and_its_node_suspected(
    dsn: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in a driver, as if by SIGSTOP, with one task that runs and one that ends meanwhile. Neither
    may show as running for ever."""
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
        await await_until(lambda: len(ours(options, "sleep")) == 2, "both programs")
        os.kill(reporter.pid, signal.SIGSTOP)
        [ended] = [process for process in ours(options, "sleep") if process.cmdline() == ["sleep", "601"]]
        ended.kill()
        await reporter.killed()
        await await_until(lambda: not ours(options, "sleep"), "the end of both, with their leases")
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
    """A task outlives its lease twice. Then the network is cut: it gets SIGTERM and the rest of the lease to
    save its work."""
    cell, wire = Cell(MemoryLog(broker, "placer")), Wire(broker, "node-reporter")
    async with working(options, wire):
        for number in itertools.count(1):
            if await outlived_and_stopped(options, cell, wire, 2 * number):
                break
        await cell.order(start_order(2 * number + 1, "true", lease_ms=3_000))
        wire.cut = False
        assert (await cell.until(TaskExited, task_id=f"job-{2 * number + 1}.1.0")).exit_code == 0


async def outlived_and_stopped(options: Options, cell: Cell, wire: Wire, token: int) -> bool:
    """False: this machine stood still for so long that the lease ended, or that its rest did not suffice."""
    wire.cut = False
    order = start_order(token, "sh", "-c", "trap 'exit 3' TERM; while :; do sleep 0.05; done", lease_ms=2_000)
    await cell.order(order)
    program = psutil.Process((await cell.until(TaskStarted, task_id=order.task_id)).pid)
    gaps_s, first_s = [0.0], contact_s(options)

    def outlived() -> bool:
        gaps_s.append(boot_s() - contact_s(options))
        return contact_s(options) > first_s + 4.0 or not program.is_running()

    await await_until(outlived, f"the lease of {order.task_id} to be renewed")
    if contact_s(options) <= first_s + 4.0:
        assert max(gaps_s) > STOP_AFTER * 2.0, "it was ended while the log was there"
    wire.cut = True
    exited = await cell.until(TaskExited, task_id=order.task_id)
    return max(gaps_s) <= STOP_AFTER * 2.0 and (exited.cause, exited.exit_code) == ("stopped", 3)


def contact_s(options: Options) -> float:
    """The latest contact that the reporter has written down, by the boot-time clock."""
    return lease_watch.read_contact_s(str(options.state_dir / "lease"))


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
    """A node without tasks asks nothing. Its last contact is so old that a running task would be stopped
    now."""
    note_contact(options, ago_s=540)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, Wire(broker, "node-reporter")):
        await cell.order(start_order(1, "sleep", "0.2", lease_ms=600_000))
        exited = await cell.until(TaskExited)
    assert (exited.cause, exited.exit_code) == ("exited", 0)


async def test_the_first_task_of_a_node_may_bring_its_code(
    options: Options, broker: MemoryBroker, tmp_path: Path
) -> None:
    """It is fetched and unpacked while the node has had no contact yet: nothing has begun whose lease could
    have lapsed."""
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
    """An operator shortens the lease. The next task waits for contact; what runs has time by its own
    lease."""
    note_contact(options, ago_s=100)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, Wire(broker, "node-reporter")):
        await cell.order(start_order(1, "sleep", "600", lease_ms=600_000))
        await cell.until(TaskStarted)
        await cell.order(start_order(2, "true", gpus=(1,), lease_ms=80_000))
        exited = await cell.until(TaskExited)
        assert (exited.task_id, exited.cause, exited.exit_code) == ("job-2.1.0", "exited", 0)
        assert len(cell.events(NodeJoined)) == 1


async def test_a_drained_node_leaves_while_a_task_waits_for_contact(
    options: Options, broker: MemoryBroker
) -> None:
    """The log takes appends and answers no question, and an operator drains the node: the task never
    begins."""
    cell, wire = Cell(MemoryLog(broker, "placer")), Wire(broker, "node-reporter")
    async with working(replace(options, drain=True), wire) as stop:
        wire.cut = True
        await cell.order(start_order(1, "true", lease_ms=60_000), start_order(2, "true", lease_ms=60_000))
        await await_until(lambda: wire.refused > 0, "a task that waits for contact")
        stop.set()
        for task_id in ("job-1.1.0", "job-2.1.0"):
            exited = await cell.until(TaskExited, OrderRefused, task_id=task_id)
            assert getattr(exited, "cause", "stopped") == "stopped"
        await cell.until(NodeLeft)
    assert not cell.events(TaskStarted)
