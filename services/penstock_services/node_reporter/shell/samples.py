"""Publishes samples to the telemetry topic, at most once: one that the log does not take is no loss, the next one is fresher."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from penstock.errors import LogError
from penstock.log.port import Log, Message, Partition
from penstock.model.event import Event
from penstock.model.external_events import TelemetrySampled
from penstock.model.topics import Topic, node_partition
from penstock_services.node_reporter.shell.journal import Outgoing
from penstock_services.node_reporter.shell.outbox import event_id

MAX_UNDER_WAY = 64


class Samples:
    """Of one node. `envelope`: makes a message of an id and an event."""

    def __init__(self, log: Log, node_id: str, envelope: Callable[[str, Event], Outgoing]) -> None:
        self._log = log
        self._node_id = node_id
        self._envelope = envelope
        self._partition = Partition(Topic.TELEMETRY, node_partition(node_id))
        self._under_way: set[asyncio.Task[None]] = set()

    def publish(self, sample: TelemetrySampled) -> None:
        if len(self._under_way) < MAX_UNDER_WAY:
            what = "sample" if sample.loss is None else "loss"
            id_ = event_id(self._node_id, what, sample.task_id, sample.gpu, sample.at_ms)
            message = self._envelope(id_, sample).message
            task = asyncio.get_running_loop().create_task(
                self._append(replace(message, partition=self._partition))
            )
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _append(self, message: Message) -> None:
        with suppress(LogError):
            await self._log.append([message])

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()
