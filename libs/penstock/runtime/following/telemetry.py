"""Reader of the telemetry topic: samples of all nodes, from the topic's beginning,
each with the log's time stamp."""

import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from penstock.log.port import Log, Partition, Reader, Record
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import wire_type
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from penstock.model.wire.codec import decode
from penstock.runtime.following.ledger_follower import BATCH_MS

LOG = logging.getLogger(__name__)

PARTITIONS = tuple(Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS))
SAMPLED = wire_type(TelemetrySampled)


class Sampled(NamedTuple):
    """A sample with its time in the log."""

    event_id: str
    at_ms: int
    """The log's time stamp: nodes' clocks may jump."""
    sample: TelemetrySampled


BY_TIME = attrgetter("at_ms")
"""Of nodes in different partitions, too: a job that has moved reports in more than one."""


def sampled(record: Record) -> Sampled | None:
    """The sample in a record; None: another kind of event. Raises `EventError` for an unreadable one."""
    headers = dict(record.headers)
    if headers.get("ce_type") != SAMPLED.encode():
        return None
    found = decode(SAMPLED, record.value)
    if not isinstance(found, TelemetrySampled):
        return None
    event_id = headers.get("ce_id", b"").decode(errors="replace")
    return Sampled(event_id, max(0, record.timestamp_ms), found)


class TelemetryReader:
    """Implements `penstock.runtime.following.proposing.Telemetry` for `Sampled`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reader: Reader | None = None

    async def begin(self) -> Sequence[Sampled]:
        """The retained samples, in the order of the log's time stamps;
        call it once, before `read`. Raises `LogError`."""
        self._reader = self._log.reader(await self._log.begin_offsets(PARTITIONS), batch_ms=BATCH_MS)
        end = await self._log.end_offsets(PARTITIONS)
        found: list[Sampled] = []
        while any(self._reader.position(partition) < end[partition] for partition in PARTITIONS):
            found += self._samples(await self._reader.read())
        return sorted(found, key=BY_TIME)

    async def read(self) -> Sequence[Sampled]:
        """Waits for records and returns the samples among them, maybe none. Raises `LogError`."""
        assert self._reader is not None, "`begin` comes first"
        return self._samples(await self._reader.read())

    async def close(self) -> None:
        """Idempotent."""
        if self._reader is not None:
            await self._reader.close()

    def _samples(self, records: Iterable[Record]) -> list[Sampled]:
        found = []
        for record in records:
            try:
                one = sampled(record)
            except EventError as error:  # no state depends on telemetry
                LOG.warning("telemetry %s@%d: %s", record.partition, record.offset, error)
                continue
            if one is not None:
                found.append(one)
        return sorted(found, key=BY_TIME)
