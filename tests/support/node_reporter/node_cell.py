"""The placer's side of one node, for tests of the node-reporter: sends orders, reads what the node
reports."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

from penstock.log.port import Log, Message, Partition
from penstock.model.decisions.orders import Order, Peer, StartTask, StopTask
from penstock.model.inputs.external_events import NodeJoined, TelemetrySampled
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock.model.schema.topics import NODE_PARTITIONS, Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.files.task_logs import log_path
from penstock.runtime.settings import Settings
from penstock.runtime.this_machine import boot_id
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.run import runner
from tests.support.waiting import left_s

NODE = "n1"
TOPICS: dict[str, int] = {
    Topic.NODES: 1,
    Topic.ORDERS: NODE_PARTITIONS,
    Topic.TELEMETRY: NODE_PARTITIONS,
    Topic.DEAD_LETTERS: 1,
}
TELEMETRY = Partition(Topic.TELEMETRY, node_partition(NODE))
LOOK_MS = 500
"""Between two looks whether a reporter that is waited for still lives."""
MOST_TOLD = 60
"""Events in the story of a failure."""
MOST_PRINTED = 2_000
"""Characters of each task's output in it."""

_cells: WeakSet["Cell"] = WeakSet()
_must_live: list[Callable[[], None]] = []
"""Of each reporter that a test has not ended: raises `AssertionError` when it has ended all the same."""


def node_options(folder: Path, **changes: Any) -> Options:
    """A small node with state and logs in the folder; `changes` overrides fields."""
    fields: dict[str, Any] = {
        "node_id": NODE,
        "state_dir": folder / "state",
        "log_dir": folder / "logs",
        "virtual_gpus": 2,
        "cores": 4,
        "host_memory_mib": 8_192,
        "allow_root": True,
    }
    return Options(**fields | changes)


def start_order(
    token: int, *command: str, gpus: Sequence[int] = (0,), task_id: str | None = None, **more: Any
) -> StartTask:
    """A start order for one worker; `more` overrides fields."""
    task_id, node = task_id or f"job-{token}.1.0", more.get("node_id", NODE)
    place = TaskPlacement(
        task_id=task_id,
        role="worker",
        rank=0,
        node_id=node,
        gpus=tuple(gpus),
        cores=more.pop("cores", (0,)),
        host_memory_mib=more.pop("host_memory_mib", 0),
    )
    fields: dict[str, Any] = {
        "token": token,
        "node_id": node,
        "task_id": task_id,
        "job_id": f"job-{token}",
        "attempt": 1,
        "boot_id": boot_id(),
        "command": command or ("true",),
        "place": place,
        "gpu_uuids": tuple(f"VIRTUAL-{node}-{gpu}" for gpu in gpus),
        "peers": (Peer(rank=0, role="worker", node_id=node, address="127.0.0.1"),),
        "rendezvous_port": 29500,
        "grace_ms": 500,
    }
    return StartTask(**{**fields, **more})


def stop_order(token: int, task_id: str, grace_ms: int = 500) -> StopTask:
    return StopTask(token=token, node_id=NODE, task_id=task_id, grace_ms=grace_ms, reason="cancelled")


def printed(options: Options, job_id: str, task_id: str) -> str:
    """A task's output so far."""
    path = log_path(options.log_dir, job_id, task_id)
    return path.read_text() if path.exists() else ""


def story(options: Options) -> str:
    """The last events of all cells, and the end of each task's output."""
    lines = [f"{envelope.id}: {envelope.data}" for cell in _cells for envelope in cell.envelopes[-MOST_TOLD:]]
    for path in sorted(options.log_dir.rglob("*.log")):
        if path.is_file():  # not a FIFO of a test
            lines += [f"--- {path.name}", path.read_text(errors="replace")[-MOST_PRINTED:]]
    return "\n".join(lines)


def go_on(what: Callable[[], object]) -> None:
    """Raises `AssertionError` with what is waited for at the run's deadline, and at once when a reporter has
    ended by itself."""
    for check in _must_live:
        check()
    assert left_s() > 0, f"the whole run ends: waited for {what()}"


class Telemetry:
    """What nodes have published so far."""

    def __init__(self, log: Log) -> None:
        self.samples: list[TelemetrySampled] = []
        self._reader = log.reader({TELEMETRY: 0})

    async def until(self, enough: Callable[[list[TelemetrySampled]], bool]) -> None:
        """Waits until enough has come."""
        while not enough(self.samples):
            go_on(lambda: f"telemetry; came: {self.samples}")
            for record in await self._reader.read(
                timeout_ms=LOOK_MS
            ):  # clock: a look whether the reporter lives
                sample = from_wire(record.headers, record.value, Topic.TELEMETRY).data
                assert isinstance(sample, TelemetrySampled)
                self.samples.append(sample)

    async def close(self) -> None:
        await self._reader.close()


class Cell:
    """The placer's side of one node: sends orders, reads what the node reports."""

    def __init__(self, log: Log, start: int = 0) -> None:
        """Hears everything from offset `start` of the nodes topic."""
        self.log = log
        self.envelopes: list[Envelope] = []
        self._reader = log.reader({Partition(Topic.NODES, 0): start})
        _cells.add(self)

    async def order(self, *orders: Order) -> None:
        messages = []
        for order in orders:
            id_ = f"order/{getattr(order, 'task_id', '')}/{order.token}/{order.TYPE}"
            headers, value = to_wire(Envelope(id=id_, source="/test", time_ms=1, data=order))
            partition = Partition(Topic.ORDERS, node_partition(order.node_id))
            messages.append(Message(partition, value, headers, order.node_id.encode()))
        await self.log.append(messages)

    async def until(self, *wanted: type[Event], task_id: str | None = None, count: int = 1) -> Any:
        """Waits for the `count`-th event of one of these types (about this task)."""
        while True:
            found = [
                event for event in self.events(*wanted) if task_id in (None, getattr(event, "task_id", None))
            ]
            if len(found) >= count:
                return found[count - 1]
            go_on(lambda: f"{[each.__name__ for each in wanted]} {task_id} #{count}")
            await self.read(LOOK_MS)

    async def next_join(self, incarnation: int = 0) -> NodeJoined:
        """The first joining after that of this incarnation; copies of earlier ones, which a killed reporter
        may have left unacknowledged, are passed over."""
        count = 0
        while True:
            count += 1
            joined: NodeJoined = await self.until(NodeJoined, count=count)
            if joined.incarnation > incarnation:
                return joined

    async def close(self) -> None:
        await self._reader.close()

    async def read(self, timeout_ms: int) -> None:
        """Takes what has come, or comes within this time."""
        for record in await self._reader.read(timeout_ms=timeout_ms):  # clock: the caller waits for an event
            self.envelopes.append(from_wire(record.headers, record.value, Topic.NODES))

    def events(self, *wanted: type[Event]) -> list[Event]:
        return [e.data for e in self.envelopes if not wanted or isinstance(e.data, wanted)]

    def ids(self, wanted: type[Event]) -> set[str]:
        return {e.id for e in self.envelopes if isinstance(e.data, wanted)}


@asynccontextmanager
async def working(options: Options, log: Log) -> AsyncIterator[asyncio.Event]:
    """A node-reporter in this process; yields its stop."""
    stop, ready = asyncio.Event(), asyncio.Event()
    life = asyncio.ensure_future(runner(options)(Settings(log_url="memory"), stop, log=log, ready=ready))
    is_ready = asyncio.ensure_future(ready.wait())
    await asyncio.wait([life, is_ready], return_when=asyncio.FIRST_COMPLETED)
    is_ready.cancel()

    def check() -> None:
        if life.done() and not stop.is_set():
            raise AssertionError("the node-reporter has ended") from life.exception()

    _must_live.append(check)
    try:
        yield stop
    finally:
        _must_live.remove(check)
        stop.set()
        await life


def ours(options: Options, name: str = "") -> list[psutil.Process]:
    """Living processes that carry this node's marks, also those of its state folders within the first; with a
    name, those so called."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            marked = Path(process.environ().get("PENSTOCK_STATE_DIR", "/")).is_relative_to(options.state_dir)
            if marked and process.status() != psutil.STATUS_ZOMBIE and name in ("", process.name()):
                found.append(process)
    return found


def end_tasks(options: Options) -> None:
    """SIGKILL to every process of this node's tasks."""
    for process in ours(options):
        with suppress(psutil.NoSuchProcess):  # it ended with its namespace
            process.kill()


class Reporter:
    """A node-reporter in a process of its own."""

    def __init__(self, child: asyncio.subprocess.Process, *, must_live: bool) -> None:
        self.child = child
        self._must_live = must_live

    def check(self) -> None:
        """Raises `AssertionError` when it has ended, and the test has not ended it."""
        ended = self._must_live and self.child.returncode is not None
        assert not ended, f"the node-reporter has ended with {self.child.returncode}"

    @property
    def pid(self) -> int:
        return self.child.pid

    async def killed(self) -> None:
        """Waits until it died of SIGKILL (a failpoint)."""
        self._must_live = False
        assert await self.child.wait() == -signal.SIGKILL

    async def kill(self) -> None:
        self._must_live = False
        self.child.kill()
        await self.child.wait()

    async def terminate(self) -> int:
        """SIGTERM; its exit status."""
        self._must_live = False
        self.child.terminate()
        return await self.child.wait()


@asynccontextmanager
async def reporter_process(
    options: Options, log_url: str, *more: str, failpoint: str = "", env: dict[str, str] | None = None
) -> AsyncIterator[Reporter]:
    """A ready one; killed at the end if it still lives. Its tasks are not touched.

    `failpoint`: where it kills itself, ready or not.
    """
    environment = {
        **os.environ,
        **(env or {}),
        **Settings(log_url=log_url).environment(),
        "PENSTOCK_FAILPOINT": failpoint,
    }
    arguments = [
        "--node-id",
        options.node_id,
        "--state-dir",
        str(options.state_dir),
        "--log-dir",
        str(options.log_dir),
    ]
    arguments += [] if options.virtual_gpus is None else ["--virtual-gpus", str(options.virtual_gpus)]
    arguments += ["--cores", "4", "--host-memory", "8GiB", "--allow-root", *more]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_services.node_reporter",
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    reporter = Reporter(child, must_live=not failpoint)
    _must_live.append(reporter.check)
    try:
        assert child.stdout is not None
        line = await child.stdout.readline()
        if not failpoint:
            assert line == b"ready\n"
        yield reporter
    finally:
        _must_live.remove(reporter.check)
        if child.returncode is None:
            child.kill()
        await child.wait()
