"""Publisher of samples to the telemetry topic, at most once: a failed append is not retried, since the next
sample is newer.

Bounded per node, for any behaviour of its tasks: a token bucket, and a number of appends under way. Dropped
samples are counted and logged.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import asdict, replace

from penstock.errors import LogError
from penstock.log.port import Log, Message, Partition
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock_services.node_reporter.core.reports.rates import TokenBucket
from penstock_services.node_reporter.shell.journal import Outgoing
from penstock_services.node_reporter.shell.link.outbox import event_id

MAX_UNDER_WAY = 64
PER_S = 50.0  # of one node, sustained: 16 GPUs and 64 tasks whose use changes all the time have 48
BURST = 200.0  # every value of so many tasks at once
REPORT_S = 60.0  # between lines in the service's log about dropped samples
MEASURED = (
    "loss",
    "step_ms",
    "cpu_stalled_percent",
    "memory_bandwidth_percent",
    "cpu_percent",
    "gpu_utilisation_percent",
)
"""One of them is part of a sample's id: several of one task may be of the same millisecond."""

logger = logging.getLogger(__name__)


class Samples:
    """Of one node. `envelope`: makes a message of an id and an event."""

    def __init__(self, log: Log, node_id: str, envelope: Callable[[str, Event], Outgoing]) -> None:
        self.dropped = 0
        """Samples that were not published, since there were too many."""
        self._log = log
        self._node_id = node_id
        self._envelope = envelope
        self._partition = Partition(Topic.TELEMETRY, node_partition(node_id))
        self._under_way: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._bucket = TokenBucket(PER_S, BURST)
        self._logged = 0
        self._report: asyncio.TimerHandle | None = None

    def publish(self, sample: TelemetrySampled) -> None:
        if len(self._under_way) >= MAX_UNDER_WAY or not self._bucket.take(self._loop.time()):
            self._drop()
            return
        found = asdict(sample)
        what = next((name for name in MEASURED if found[name] is not None), "sample")
        id_ = event_id(self._node_id, what, sample.task_id, sample.gpu, sample.at_ms)
        message = self._envelope(id_, sample).message
        task = self._loop.create_task(self._append(replace(message, partition=self._partition)))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _drop(self) -> None:
        """The first one is logged at once, further ones together."""
        self.dropped += 1
        if self._report is None:
            self._log_dropped()

    def _log_dropped(self) -> None:
        """Logs the samples dropped since the last line; repeats as long as there are any."""
        self._report = None
        new = self.dropped - self._logged
        if new:
            logger.warning(
                "%d samples of telemetry were dropped, %d in all: more than %g a second, or a slow log",
                new,
                self.dropped,
                PER_S,
            )
            self._logged = self.dropped
            self._report = self._loop.call_later(REPORT_S, self._log_dropped)

    async def _append(self, message: Message) -> None:
        with suppress(LogError):
            await self._log.append([message])

    def close(self) -> None:
        self._log_dropped()
        if self._report is not None:
            self._report.cancel()
        for task in self._under_way:
            task.cancel()
