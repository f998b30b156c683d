"""Tumbling windows of telemetry per node, as a port to the reader that merges the samples of the telemetry
topic.

`LogWindows` reads the topic with the log's own reader, on every log. Merging is idempotent and commutative
(`penstock.scheduling.acting.telemetry_windows`), so an adapter may deliver a window again, or one that is
older than the one returned before.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from penstock.log.port import Log
from penstock.runtime.following.telemetry import Sampled, TelemetryReader
from penstock.scheduling.acting.telemetry_windows import NodeWindow, held_with, matters, merged, window_of


class Windows(Protocol):
    """Reads windows of all nodes. Not for concurrent use."""

    async def begin(self) -> Sequence[NodeWindow]:
        """Once, before `read`: the retained windows up to now,
        per node in rising order of time. Raises `LogError`."""
        ...

    async def read(self) -> Sequence[NodeWindow]:
        """Waits for windows that have changed since they were returned, and returns their present state: at
        least one, also windows that have not ended yet, within a second of the sample. Per node in rising
        order of time; nodes may interleave. Cancelling it loses nothing. Raises `LogError`.
        """
        ...

    async def close(self) -> None:
        """Frees what it holds; idempotent."""
        ...


class Held:
    """The latest windows of each node, bounded."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, NodeWindow]] = {}

    def add(self, one: Sampled) -> NodeWindow | None:
        """The window after the merge;
        None: nothing new, no field of a window, or its window is dropped already."""
        if not matters(one.sample):
            return None
        node_id, begin_ms = one.sample.node_id, window_of(one.at_ms)
        windows = self._nodes.setdefault(node_id, {})
        before = windows.get(begin_ms, NodeWindow(node_id, begin_ms))
        after = merged(before, one.event_id, one.at_ms, one.sample)
        held = held_with(windows, begin_ms)
        if after == before or begin_ms not in held:
            return None
        for dropped in windows.keys() - held:
            del windows[dropped]
        windows[begin_ms] = after
        return after

    def restore(self, window: NodeWindow) -> None:
        """Adds a window that was held before. At most `HELD_WINDOWS` of a node."""
        self._nodes.setdefault(window.node_id, {})[window.begin_ms] = window

    def begins(self, node_id: str) -> Set[int]:
        """Of the node's windows."""
        return self._nodes.get(node_id, {}).keys()

    def all(self) -> Sequence[NodeWindow]:
        """Per node in rising order of time."""
        return [windows[begin_ms] for windows in self._nodes.values() for begin_ms in sorted(windows)]


class LogWindows:
    """A `Windows` that reads all partitions of the telemetry topic from their beginnings."""

    def __init__(self, log: Log) -> None:
        self._reader = TelemetryReader(log)
        self._held = Held()

    async def begin(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        self._take(await self._reader.begin())
        return self._held.all()

    async def read(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        while not (changed := self._take(await self._reader.read())):
            pass
        return changed

    async def close(self) -> None:
        """As `Windows`."""
        await self._reader.close()

    def _take(self, samples: Iterable[Sampled]) -> Sequence[NodeWindow]:
        """The windows that these samples change."""
        changed: dict[tuple[str, int], NodeWindow] = {}
        for one in samples:
            if (window := self._held.add(one)) is not None:
                changed[window.node_id, window.begin_ms] = window
        return [changed[key] for key in sorted(changed)]
