"""Tumbling windows of telemetry per node, as a port: who reads the telemetry topic and merges its samples.

`LogWindows` reads the topic with the log's own reader, on every log. Merging is idempotent and commutative
(`penstock.policies.telemetry_windows`), so an adapter may deliver a window again, or one that has gone back behind what was returned.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.log.port import Log, Partition, Reader, Record
from penstock.model.codec import decode
from penstock.model.errors import EventError
from penstock.model.event import wire_type
from penstock.model.external_events import TelemetrySampled
from penstock.model.topics import NODE_PARTITIONS, Topic
from penstock.policies.telemetry_windows import NodeWindow, matters, merged, window_of

LOG = logging.getLogger(__name__)

BATCH_MS = 20  # under load a poll costs more than the records that it brings; after idle nothing waits
HELD_WINDOWS = 8
"""Per node, the latest ones; samples of older ones come too late and are left out. A node without news has none, so these may be of any age."""
SAMPLED = wire_type(TelemetrySampled).encode()


class Windows(Protocol):
    """Reads windows of all nodes. Not for concurrent use."""

    async def begin(self) -> Sequence[NodeWindow]:
        """Once, before `read`: what is retained of the time until now, per node in rising order of time. Raises `LogError`."""
        ...

    async def read(self) -> Sequence[NodeWindow]:
        """Waits for windows that have changed since they were returned, and returns them as they are now: one at least, also
        those that have not ended yet, within a second of the sample. Per node in rising order of time; nodes may interleave. Cancelling it loses nothing.
        Raises `LogError`.
        """
        ...

    async def close(self) -> None:
        """Frees what it holds; idempotent."""
        ...


class Sampled(NamedTuple):
    """A sample as the log has it."""

    event_id: str
    at_ms: int
    """When the log took it: nodes' clocks may jump."""
    sample: TelemetrySampled


def sampled(record: Record) -> Sampled | None:
    """None: another kind of event, or a sample without anything that a window holds. Raises `EventError` for what cannot be read."""
    headers = dict(record.headers)
    if headers.get("ce_type") != SAMPLED:
        return None
    found = decode(SAMPLED.decode(), record.value)
    if not isinstance(found, TelemetrySampled) or not matters(found):
        return None
    event_id = headers.get("ce_id", b"").decode(errors="replace")
    return Sampled(event_id, max(0, record.timestamp_ms), found)


class Held:
    """The latest windows of each node, bounded."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, NodeWindow]] = {}

    def add(self, one: Sampled) -> NodeWindow | None:
        """The window as it is then; None: nothing new, or its window is held no more."""
        node_id, begin_ms = one.sample.node_id, window_of(one.at_ms)
        windows = self._nodes.setdefault(node_id, {})
        before = windows.get(begin_ms, NodeWindow(node_id, begin_ms))
        after = merged(before, one.event_id, one.at_ms, one.sample)
        if after == before:
            return None
        windows[begin_ms] = after
        if len(windows) > HELD_WINDOWS:
            del windows[min(windows)]
        return windows.get(begin_ms)

    def restore(self, window: NodeWindow) -> None:
        """Holds a window that was held before. At most `HELD_WINDOWS` of a node."""
        self._nodes.setdefault(window.node_id, {})[window.begin_ms] = window

    def all(self) -> Sequence[NodeWindow]:
        """Per node in rising order of time."""
        return [windows[begin_ms] for windows in self._nodes.values() for begin_ms in sorted(windows)]


class LogWindows:
    """A `Windows` that reads all partitions of the telemetry topic from their beginnings."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._partitions = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
        self._reader: Reader | None = None
        self._held = Held()
        self.unreadable = 0
        """Records that could not be read: telemetry is looked at only, so they are counted and passed over."""

    async def begin(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        start = await self._log.begin_offsets(self._partitions)
        self._reader = self._log.reader(start, batch_ms=BATCH_MS)
        end = await self._log.end_offsets(self._partitions)
        while any(self._reader.position(partition) < end[partition] for partition in self._partitions):
            self._take(await self._reader.read())
        return self._held.all()

    async def read(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        assert self._reader is not None, "`begin` comes first"
        while True:
            changed = self._take(await self._reader.read())
            if changed:
                return changed

    async def close(self) -> None:
        """As `Windows`."""
        if self._reader is not None:
            await self._reader.close()

    def _take(self, records: Iterable[Record]) -> Sequence[NodeWindow]:
        """The windows that these change."""
        changed: dict[tuple[str, int], NodeWindow] = {}
        for record in records:
            try:
                one = sampled(record)
            except EventError as error:
                self.unreadable += 1
                LOG.warning("telemetry %s@%d: %s", record.partition, record.offset, error)
                continue
            if one is not None and (window := self._held.add(one)) is not None:
                changed[window.node_id, window.begin_ms] = window
        return [changed[key] for key in sorted(changed)]
