"""The node-reporter with real processes: first in this process over a log in memory."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.cluster.nouns import TaskPlacement
from penstock.events import doors
from penstock.events.base import Event
from penstock.events.envelope import Envelope, from_wire, to_wire
from penstock.events.facts import Order, Peer, StartTask, StopTask
from penstock.events.topics import NODE_PARTITIONS, Topic, node_partition
from penstock.kernel.log import Log, Message, Partition
from penstock.kernel.memory_log import MemoryBroker, MemoryLog
from penstock.kernel.settings import Settings
from penstock.kernel.task_logs import log_path
from penstock.node_reporter.options import Options
from penstock.node_reporter.shell.inventory import boot_id
from penstock.node_reporter.shell.run import runner

NODE = "n1"
TOPICS = {
    Topic.NODES: 1,
    Topic.ORDERS: NODE_PARTITIONS,
    Topic.TELEMETRY: NODE_PARTITIONS,
    Topic.DEAD_LETTERS: 1,
}
WAIT_S = 20.0


def start_order(token: int, *command: str, gpus: Sequence[int] = (0,), task_id: str | None = None, **more: Any) -> StartTask:  # fmt: skip
    """A start order for one worker; `more` overrides fields."""
    task_id = task_id or f"job-{token}.1.0"
    place = TaskPlacement(
        task_id=task_id, role="worker", rank=0, node_id=NODE, gpus=tuple(gpus), cores=more.pop("cores", (0,)),
        host_memory_mib=more.pop("host_memory_mib", 0),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "token": token, "node_id": NODE, "task_id": task_id, "job_id": f"job-{token}", "attempt": 1,
        "boot_id": boot_id(), "command": command or ("true",), "place": place,
        "peers": (Peer(rank=0, role="worker", node_id=NODE, address="127.0.0.1"),),
        "rendezvous_port": 29500, "grace_ms": 500,
    }  # fmt: skip
    return StartTask(**{**fields, **more})


def stop_order(token: int, task_id: str, grace_ms: int = 500) -> StopTask:
    return StopTask(token=token, node_id=NODE, task_id=task_id, grace_ms=grace_ms, reason="cancelled")


class Cell:
    """The placer's side of one node: sends orders, reads what the node says."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.envelopes: list[Envelope] = []
        self._reader = log.reader({Partition(Topic.NODES, 0): 0})

    async def order(self, *orders: Order) -> None:
        partition = Partition(Topic.ORDERS, node_partition(NODE))
        messages = []
        for order in orders:
            id_ = f"order/{order.task_id}/{order.token}/{order.TYPE}"
            headers, value = to_wire(Envelope(id=id_, source="/test", time_ms=1, data=order))
            messages.append(Message(partition, value, headers, order.node_id.encode()))
        await self.log.append(messages)

    async def until(self, *wanted: type[Event], task_id: str | None = None, count: int = 1) -> Any:
        """Waits for the `count`-th event of one of these types (about this task); fails after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = [
                event for event in self.events(*wanted) if task_id in (None, getattr(event, "task_id", None))
            ]
            if len(found) >= count:
                return found[count - 1]
            left_ms = round((deadline - time.monotonic()) * 1_000)
            assert left_ms > 0, f"no {[w.__name__ for w in wanted]} {task_id} #{count}; came: {self.events()}"
            await self.read(left_ms)

    async def read(self, timeout_ms: int) -> None:
        for record in await self._reader.read(timeout_ms=timeout_ms):
            self.envelopes.append(from_wire(record.headers, record.value, Topic.NODES))

    def events(self, *wanted: type[Event]) -> list[Event]:
        return [e.data for e in self.envelopes if not wanted or isinstance(e.data, wanted)]

    def ids(self, wanted: type[Event]) -> set[str]:
        return {e.id for e in self.envelopes if isinstance(e.data, wanted)}


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


@asynccontextmanager
async def working(options: Options, log: Log) -> AsyncIterator[asyncio.Event]:
    """A node-reporter in this process; yields its stop."""
    stop, ready = asyncio.Event(), asyncio.Event()
    life = asyncio.ensure_future(runner(options)(Settings("memory"), stop, log=log, ready=ready))
    await asyncio.wait([life, asyncio.ensure_future(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield stop
    finally:
        stop.set()
        await life


@pytest.fixture
async def node(options: Options, broker: MemoryBroker) -> AsyncIterator[Options]:
    async with working(options, MemoryLog(broker, "node-reporter")):
        yield options


@pytest.fixture(autouse=True)
def nothing_left(options: Options) -> Any:
    """Whatever a test starts, it must not outlive it (and the machine must stay clean even when it fails)."""
    yield
    left = ours(options)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def ours(options: Options) -> list[psutil.Process]:
    """Living processes that carry this node's marks."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            marked = process.environ().get("PENSTOCK_STATE_DIR") == str(options.state_dir)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it never became so"
        await asyncio.sleep(0.02)


async def test_a_task_starts_runs_and_ends_with_its_code(node: Options, cell: Cell) -> None:
    """The ordinary life: joined, ordered, started, exited; its output is in its log."""
    joined = await cell.until(doors.NodeJoined)
    assert [gpu.index for gpu in joined.node.gpus] == [0, 1]
    await cell.order(start_order(7, "sh", "-c", "echo hello; exit 3"))
    started = await cell.until(doors.TaskStarted)
    exited = await cell.until(doors.TaskExited)
    assert (started.token, exited.token, exited.cause, exited.exit_code, exited.signal) == (
        7,
        7,
        "exited",
        3,
        None,
    )
    assert exited.started_ms == started.started_ms <= exited.exited_ms
    path = log_path(node.log_dir, "job-7", "job-7.1.0")
    assert path.read_text() == "hello\n"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_missing_program_fails_to_start_and_says_what_to_do(node: Options, cell: Cell) -> None:
    """A typo in the command, or a program that this node lacks."""
    await cell.order(
        start_order(1, "no-such-program"), start_order(2, "true", gpus=(1,), workdir="/no/such/folder")
    )
    first = await cell.until(doors.TaskExited, task_id="job-1.1.0")
    second = await cell.until(doors.TaskExited, task_id="job-2.1.0")
    assert first.cause == second.cause == "start_failed"
    assert "no-such-program" in first.detail
    assert "/no/such/folder" in second.detail
    assert not cell.events(doors.TaskStarted)


async def test_a_task_that_ignores_sigterm_is_killed_after_its_grace(node: Options, cell: Cell) -> None:
    """A training script swallows SIGTERM; the GPU is free only when it is proven dead."""
    script = (
        "import signal,time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    await cell.order(start_order(1, sys.executable, "-c", script))
    await cell.until(doors.TaskStarted)
    await eventually(lambda: "deaf" in log_path(node.log_dir, "job-1", "job-1.1.0").read_text())
    before = time.monotonic()
    await cell.order(stop_order(2, "job-1.1.0", grace_ms=400))
    exited = await cell.until(doors.TaskExited)
    assert 0.39 < time.monotonic() - before < 3
    assert (exited.cause, exited.signal) == ("stopped", 9)
