"""Nodes without processes: they answer orders as a reporter does, for tests and for load.

All nodes live in one object and read all partitions of the orders. A task "runs" for `run_ms` on the event
loop's clock. For judging safety there is `tests.faults.processes.judge_node`, which starts real processes.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.clock import wall_ms
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.decisions.orders import StartTask, StopTask
from penstock.model.inputs.external_events import NodeJoined, OrderRefused, TaskExited, TaskStarted
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from penstock.model.wire.codec import encode
from penstock.model.wire.envelope import headers

START_TASK = f"{StartTask.TYPE}.v{StartTask.VERSION}".encode()
STOP_TASK = f"{StopTask.TYPE}.v{StopTask.VERSION}".encode()


class _Place(msgspec.Struct):
    gpus: tuple[int, ...]


class _Order(msgspec.Struct):
    """The fields of both kinds of order that a fake node needs."""

    token: int
    node_id: str
    task_id: str
    place: _Place = field(default_factory=lambda: _Place(()))


_order = msgspec.json.Decoder(_Order).decode


@dataclass(slots=True)
class Seen:
    """What the nodes did, for assertions."""

    started: dict[str, int] = field(default_factory=dict)
    """Task id → ms since the epoch at which it started."""
    exited: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    collisions: list[str] = field(default_factory=list)
    """Two living tasks on one GPU: must stay empty."""
    vacant_ms: list[int] = field(default_factory=list)
    """Per start on a GPU that was used before: time from the end of the last task there."""


class FakeNodes:
    """Many nodes at once. `run` works until cancelled."""

    def __init__(
        self,
        log: Log,
        specs: Iterable[NodeSpec],
        cell_index: int = 0,
        run_ms: float = 0.0,
        exit_code: int = 0,
        batch_ms: int = 0,
    ) -> None:
        self.seen = Seen()
        self._batch_ms = batch_ms
        self.exit_code = exit_code
        self.run_ms = run_ms
        self._log = log
        self._specs = {spec.node_id: spec for spec in specs}
        self._nodes = Partition(Topic.NODES, cell_index)
        self._alive: dict[str, tuple[int, str, int]] = {}
        self._owner: dict[tuple[str, int], str] = {}
        self._gpus: dict[str, tuple[tuple[str, int], ...]] = {}
        self._highest: dict[tuple[str, int], int] = {}
        self._freed_ms: dict[tuple[str, int], int] = {}
        self._out: list[Message] = []
        self._sending = asyncio.Event()

    async def run(self) -> None:
        """Joins all nodes, then obeys."""
        start = await self._log.end_offsets(
            [Partition(Topic.ORDERS, index) for index in range(NODE_PARTITIONS)]
        )
        reader = self._log.reader(start, batch_ms=self._batch_ms)
        for spec in self._specs.values():
            self._emit(NodeJoined(node=spec), f"joined-{spec.node_id}-{wall_ms()}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            while True:
                for record in await reader.read():
                    self._obey(record)

    def _obey(self, record: Record) -> None:
        kind = dict(record.headers)["ce_type"]
        if kind not in (START_TASK, STOP_TASK):
            return
        order = _order(record.value)
        if order.node_id not in self._specs:
            return
        if kind == START_TASK:
            self._start(order)
        elif kind == STOP_TASK:
            self._stop(order)

    def _start(self, order: _Order) -> None:
        if order.task_id in self.seen.started:
            return
        gpus = tuple((order.node_id, gpu) for gpu in order.place.gpus)
        highest = max((self._highest.get(gpu, 0) for gpu in gpus), default=0)
        if order.token < highest:
            self.seen.refused.append(order.task_id)
            refused = OrderRefused(
                node_id=order.node_id,
                task_id=order.task_id,
                token=order.token,
                reason="stale_token",
                highest_token=highest,
            )
            self._emit(refused, f"refused-{order.task_id}-{order.token}")
            return
        for gpu in gpus:
            if gpu in self._owner:
                self.seen.collisions.append(f"{order.task_id} and {self._owner[gpu]} on {gpu}")
            self._owner[gpu] = order.task_id
            self._highest[gpu] = order.token
        now_ms = wall_ms()
        self.seen.vacant_ms += (now_ms - self._freed_ms.pop(gpu) for gpu in gpus if gpu in self._freed_ms)
        self._gpus[order.task_id] = gpus
        self._alive[order.task_id] = (order.token, order.node_id, now_ms)
        self.seen.started[order.task_id] = now_ms
        started = TaskStarted(
            node_id=order.node_id, task_id=order.task_id, token=order.token, pid=1, started_ms=now_ms
        )
        self._emit(started, f"started-{order.task_id}")
        if self.run_ms <= 0:
            self._end(order.task_id, "exited")
        else:
            asyncio.get_running_loop().call_later(self.run_ms / 1_000, self._end, order.task_id, "exited")

    def _stop(self, order: _Order) -> None:
        if order.task_id in self._alive:
            self._end(order.task_id, "stopped")
        elif order.task_id not in self.seen.started:
            self.seen.started[order.task_id] = 0
            self._exited(order.task_id, order.token, order.node_id, wall_ms(), "stopped")

    def _end(self, task_id: str, cause: str) -> None:
        found = self._alive.pop(task_id, None)
        if found is None:
            return
        now_ms = wall_ms()
        for gpu in self._gpus.pop(task_id):
            self._owner.pop(gpu, None)
            self._freed_ms[gpu] = now_ms
        token, node_id, started_ms = found
        self._exited(task_id, token, node_id, started_ms, cause)

    def _exited(self, task_id: str, token: int, node_id: str, started_ms: int, cause: Any) -> None:
        self.seen.exited.append(task_id)
        exited = TaskExited(
            node_id=node_id,
            task_id=task_id,
            token=token,
            cause=cause,
            exit_code=self.exit_code if cause == "exited" else None,
            signal=None if cause == "exited" else 15,
            started_ms=started_ms,
            exited_ms=wall_ms(),
        )
        self._emit(exited, f"exited-{task_id}")

    def _emit(self, event: Event, event_id: str) -> None:
        kind = f"{event.TYPE}.v{event.VERSION}"
        found = headers(event_id, "/penstock/fake-nodes", kind, event.subject(), wall_ms())
        self._out.append(Message(self._nodes, encode(event), found))
        self._sending.set()

    async def _send(self) -> None:
        while True:
            await self._sending.wait()
            self._sending.clear()
            messages, self._out = self._out, []
            await self._log.append(messages)
