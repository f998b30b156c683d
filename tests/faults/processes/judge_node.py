"""The judge: an independent fake node that really starts processes and keeps its own history of them.

It shares no code with the node-reporter and trusts the placer's orders: whatever carries a token above the
highest it has seen for the GPUs is started at once, even where another process still runs. A placer that
gives a GPU out twice therefore shows up as two living processes in the history, not as a refusal.

    python -m tests.faults.processes.judge_node --node-id n1 --gpus 4 --history FILE

The history is append-only, one JSON object per line, written and fsynced before a start and after an exit
(and before the exit is reported): `{at_ns, kind, node, boot, gpus (UUIDs), job, attempt, task, token, pid,
code}`. `at_ns` is CLOCK_MONOTONIC, one clock for all processes of this machine. Kinds: `boot`, `start`,
`exit`, `died` (the judge's own machine crashed: its children died with it, proven at the next boot),
`refused`, `duplicate`. A kill -9 of the judge is a crash of its machine.
"""

import argparse
import asyncio
import ctypes
import json
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.decisions.orders import StartTask, StopTask
from penstock.model.inputs.external_events import NodeJoined, OrderRefused, TaskExited, TaskStarted
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import Usage
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.service import main as service_main
from penstock.runtime.settings import Settings

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
RETRY_S = 0.05  # between appends that failed
CANNOT_EXECUTE = 127
_libc = ctypes.CDLL(None, use_errno=True)


class History:
    """The judge's memory: an append-only file."""

    def __init__(self, path: Path, node_id: str) -> None:
        self._path = path
        self._node = node_id
        self.entries = read_history(path) if path.exists() else []
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, order: Any = None, **more: object) -> None:
        """One line, on the disk when this returns."""
        at_ns = time.monotonic_ns()  # clock: one for all nodes, it orders events
        entry: dict[str, Any] = {"at_ns": at_ns, "kind": kind, "node": self._node, **more}
        if isinstance(order, StartTask):
            entry |= {
                "gpus": list(order.gpu_uuids),
                "job": order.job_id,
                "attempt": order.attempt,
                "task": order.task_id,
                "token": order.token,
            }
        self._file.write(json.dumps(entry).encode() + b"\n")
        os.fsync(self._file.fileno())


def read_history(path: Path) -> list[dict[str, Any]]:
    """All entries in order; a line that a crash cut short (it was not fsynced: nothing followed) is left
    out."""
    entries = []
    for line in path.read_bytes().split(b"\n"):
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


class Running:
    """A child of ours."""

    def __init__(self, order: StartTask, pid: int, started_ms: int) -> None:
        self.order = order
        self.pid = pid
        self.started_ms = started_ms
        self.stopped = False


class JudgeNode:
    """One fake node from boot to kill."""

    def __init__(self, options: argparse.Namespace, settings: Settings, log: Log) -> None:
        self._log = log
        self._node_id: str = options.node_id
        self._boot = secrets.token_hex(8)
        self._orders = Partition(Topic.ORDERS, node_partition(self._node_id))
        self._nodes = Partition(Topic.NODES, settings.cell_index)
        self._spec = NodeSpec(
            node_id=self._node_id,
            boot_id=self._boot,
            cores=64,
            host_memory_mib=1 << 20,
            gpus=tuple(
                Gpu(index=i, uuid=f"judge-{self._node_id}-{i}", model="judge", memory_mib=16_384)
                for i in range(options.gpus)
            ),
        )
        self._history = History(options.history, self._node_id)
        self._highest: dict[str, int] = {}
        self._running: dict[tuple[str, int], Running] = {}
        self._answers: dict[tuple[str, int], Event] = {}
        self._never: dict[str, int] = {}
        """Task id → token of a stop that came before its start."""
        self._outbox: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._sent = 0

    async def run(self, ready: asyncio.Event | None) -> None:
        self._bury()
        reader = self._log.reader({self._orders: (await self._log.end_offsets([self._orders]))[self._orders]})
        self._history.write("boot", boot=self._boot)
        self._outbox.put_nowait(NodeJoined(node=self._spec, incarnation=wall_ms()))
        sending = asyncio.ensure_future(self._send())
        if ready is not None:
            ready.set()
        try:
            while True:
                for record in await reader.read():
                    self._obey(record)
        finally:
            sending.cancel()
            await reader.close()
            for child in self._running.values():
                os.kill(child.pid, signal.SIGKILL)

    def _bury(self) -> None:
        """What the history leaves open ran when this machine crashed: the kernel killed it; that is
        checked."""
        living: dict[tuple[str, int], dict[str, Any]] = {}
        for entry in self._history.entries:
            key = (entry.get("task", ""), entry.get("token", 0))
            if entry["kind"] == "start":
                living[key] = entry
                for gpu in entry["gpus"]:
                    self._highest[gpu] = max(entry["token"], self._highest.get(gpu, 0))
            elif entry["kind"] == "spawned" and key in living:
                living[key] |= {"pid": entry["pid"], "ticks": entry["ticks"]}
            elif entry["kind"] in ("exit", "died"):
                living.pop(key, None)
        for entry in living.values():
            if "pid" in entry:
                _await_death(entry["pid"], entry["ticks"])
            self._history.write(
                "died", **{k: v for k, v in entry.items() if k not in ("at_ns", "kind", "node")}
            )

    # ------------------------------------------------------------------------------------------ orders

    def _obey(self, record: Record) -> None:
        if record.key is not None and record.key != self._node_id.encode():
            return
        try:
            order = from_wire(record.headers, record.value, Topic.ORDERS).data
        except EventError:
            self._history.write("garbage", offset=record.offset)
            return
        if isinstance(order, StartTask) and order.node_id == self._node_id:
            self._start(order)
        elif isinstance(order, StopTask) and order.node_id == self._node_id:
            self._stop(order)

    def _start(self, order: StartTask) -> None:
        if order.boot_id != self._boot:
            return  # for a machine that has crashed since
        key = (order.task_id, order.token)
        if key in self._running or key in self._answers:
            self._history.write("duplicate", order)
            self._repeat(key)
            return
        highest = max((self._highest.get(gpu, 0) for gpu in order.gpu_uuids), default=0)
        if order.token < max(highest, self._never.get(order.task_id, 0)):
            self._history.write("refused", order)
            self._refuse(order, max(highest, self._never.get(order.task_id, 0)))
            return
        for gpu in order.gpu_uuids:
            self._highest[gpu] = order.token
        self._history.write("start", order, boot=self._boot)
        pid = _spawn(order.command)
        self._history.write("spawned", order, pid=pid, ticks=_start_ticks(pid))
        child = self._running[key] = Running(order, pid, wall_ms())
        self._watch(key, child)
        self._say_started(child)

    def _refuse(self, order: StartTask, highest: int) -> None:
        self._outbox.put_nowait(
            OrderRefused(
                node_id=self._node_id,
                task_id=order.task_id,
                token=order.token,
                reason="stale_token",
                highest_token=highest,
            )
        )

    def _repeat(self, key: tuple[str, int]) -> None:
        child = self._running.get(key)
        if child is not None:
            self._say_started(child)
        else:
            self._outbox.put_nowait(self._answers[key])

    def _say_started(self, child: Running) -> None:
        self._outbox.put_nowait(
            TaskStarted(
                node_id=self._node_id,
                task_id=child.order.task_id,
                token=child.order.token,
                pid=child.pid,
                started_ms=child.started_ms,
            )
        )

    def _stop(self, order: StopTask) -> None:
        child = next((c for c in self._running.values() if c.order.task_id == order.task_id), None)
        if child is not None:
            child.stopped = True
            os.kill(child.pid, signal.SIGKILL)
            return
        answer = next((a for (task, _), a in self._answers.items() if task == order.task_id), None)
        if answer is not None:
            self._outbox.put_nowait(answer)
            return
        self._never[order.task_id] = max(order.token, self._never.get(order.task_id, 0))
        self._outbox.put_nowait(
            OrderRefused(
                node_id=self._node_id,
                task_id=order.task_id,
                token=order.token,
                reason="unknown_task",
                highest_token=order.token,
            )
        )

    # ------------------------------------------------------------------------------------------- exits

    def _watch(self, key: tuple[str, int], child: Running) -> None:
        descriptor = os.pidfd_open(child.pid)

        def gone() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(child.pid, 0)
            self._exited(key, child, status)

        self._loop.add_reader(descriptor, gone)

    def _exited(self, key: tuple[str, int], child: Running, status: int) -> None:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        del self._running[key]
        self._history.write("exit", child.order, pid=child.pid, code=code)
        answer = self._answers[key] = TaskExited(
            node_id=self._node_id,
            task_id=child.order.task_id,
            token=child.order.token,
            cause="stopped" if child.stopped else "start_failed" if code == CANNOT_EXECUTE else "exited",
            exit_code=code,
            signal=os.WTERMSIG(status) if code is None else None,
            started_ms=child.started_ms,
            exited_ms=wall_ms(),
            usage=Usage(host_memory_mib=1),
        )
        self._outbox.put_nowait(answer)

    async def _send(self) -> None:
        """In order, each until it is acknowledged; a repeat carries the same id."""
        while True:
            events = [await self._outbox.get()]
            while not self._outbox.empty():
                events.append(self._outbox.get_nowait())
            messages = [self._message(event) for event in events]
            while True:
                try:
                    await self._log.append(messages)
                    break
                except LogError:
                    await asyncio.sleep(RETRY_S)  # clock: between two tries

    def _message(self, event: Event) -> Message:
        self._sent += 1
        headers, value = to_wire(
            Envelope(
                f"{self._node_id}/{self._boot}/{self._sent}",
                f"/judge/{self._node_id}",
                wall_ms(),
                event,
                correlation_id=getattr(event, "task_id", "").rpartition(".")[0] or None,
            )
        )
        return Message(self._nodes, value, headers, self._node_id.encode())


# ------------------------------------------------------------------------------------------- processes


def _spawn(command: tuple[str, ...]) -> int:
    """A child that dies with us."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            if os.getppid() == parent:
                os.execv(command[0], list(command))
        finally:
            os._exit(CANNOT_EXECUTE)
    return pid


def _start_ticks(pid: int) -> int:
    """The process's start time: with the pid it names one process for ever. 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return 0


def _await_death(pid: int, ticks: int) -> None:
    """Of a child of the crashed machine, which the kernel kills; a node whose child lives on is never
    ready."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if ticks and _start_ticks(pid) == ticks:
        select.select([descriptor], [], [])
    os.close(descriptor)


async def run(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """Serves until `stop`; see penstock.runtime.service."""
    parser = argparse.ArgumentParser(prog="judge_node")
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--history", type=Path, required=True)
    options = parser.parse_args(sys.argv[1:])
    used = await open_log(settings.log_url, "node-reporter").start() if log is None else log
    node = asyncio.ensure_future(JudgeNode(options, settings, used).run(ready))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({node, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (node, stopping):
            task.cancel()
        await asyncio.gather(node, stopping, return_exceptions=True)
        if log is None:
            await used.close()
    if not node.cancelled():
        node.result()


if __name__ == "__main__":
    service_main("judge-node", run)
