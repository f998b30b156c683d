"""Contention sampling: waiting for cores, and memory traffic, as samples for the contention-guard.

Where the kernel has pressure stall information, its triggers wake this node when threads really wait; nothing
is polled, and nothing is published while none waits. Without it, or without it per task, the sampler reads
their threads' waiting times at its ticks.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock_services.node_reporter.core.reports.stalls import LEAST_PERCENT, WINDOW_S, StallFilter
from penstock_services.node_reporter.core.reports.traffic import Capacity, Rate
from penstock_services.node_reporter.shell.ports import Key, Meters, Pressure, PressureTrigger

OVER_S = (
    1.5 * WINDOW_S
)  # since the trigger, which fires at least a window apart, and sometimes two, during a stall
LEAST_S = WINDOW_S / 2  # a shorter time is imprecise
MIN_CHANGE_POINTS = 10.0
NS_PER_S = 1_000_000_000
US_PER_S = 1_000_000


class Sample(Protocol):
    """Publishes one sample. `task_id` None: of the node."""

    def __call__(self, task_id: str | None, **measured: float) -> None: ...


class PressureWatch:
    """One trigger, from its first firing to the end of the stall, repeatedly."""

    def __init__(self, trigger: PressureTrigger, publish: Callable[[float], None]) -> None:
        self._trigger = trigger
        self._publish = publish
        self._filter = StallFilter()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._before = Pressure(0, 0.0)
        self._before_s = 0.0
        trigger.watch(self._fired)

    @property
    def waits(self) -> bool:
        """Whether the last sample reports a waiting thread."""
        return self._filter.waits

    def close(self) -> None:
        """No more samples."""
        self._trigger.close()
        self._cancel()

    def _fired(self) -> None:
        """Publishes at least the trigger's threshold: the stall may lie in a part of the measured time."""
        found, now_s = self._trigger.read(), self._loop.time()
        if found is None:
            self.close()
            return
        if not self._filter.waits:
            self._take(max(LEAST_PERCENT, found.avg10), found, now_s)
        elif now_s - self._before_s >= LEAST_S:
            self._take(max(LEAST_PERCENT, self._percent(found, now_s)), found, now_s)
        self._look_later()

    def _look(self) -> None:
        """No trigger for a window: the stall is over, unless the kernel has left one out."""
        self._timer = None
        found, now_s = self._trigger.read(), self._loop.time()
        if found is None:
            self.close()
            return
        self._take(self._percent(found, now_s), found, now_s)
        if self._filter.waits:
            self._look_later()

    def _percent(self, found: Pressure, now_s: float) -> float:
        waited_s = (found.waited_us - self._before.waited_us) / US_PER_S
        return 100 * waited_s / max(now_s - self._before_s, LEAST_S)

    def _take(self, percent: float, found: Pressure, now_s: float) -> None:
        self._before, self._before_s = found, now_s
        percent = min(100.0, max(0.0, percent))
        if self._filter.passes(percent, now_s):
            self._publish(percent)

    def _look_later(self) -> None:
        self._cancel()
        self._timer = self._loop.call_later(OVER_S, self._look)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True)
class _Waits:
    """Waiting times of the threads of one task, or of the node, where there is no trigger."""

    filter: StallFilter = field(default_factory=StallFilter)
    before: Mapping[int, int] | None = None
    at_s: float = 0.0

    def percent(self, waits: Mapping[int, int], now_s: float) -> float | None:
        """Percent of the time since the last call; None: this is the first. Ideal: the time in which some
        thread waited. Departure: the sum over threads, at most 100 %, which is more where several wait at the
        same time."""
        before, passed_s = self.before, now_s - self.at_s
        self.before, self.at_s = waits, now_s
        if before is None:
            return None
        grown = sum(max(0, waited - before.get(thread, 0)) for thread, waited in waits.items())
        return min(100.0, 100 * grown / NS_PER_S / max(passed_s, LEAST_S))


@dataclass(slots=True)
class _Followed:
    shim: int = 0
    groups: tuple[str, ...] | None = None
    """None: the node."""
    seen: bool = False
    """A tick has read it."""
    watch: PressureWatch | None = None
    waits: _Waits = field(default_factory=_Waits)
    traffic: Rate = field(default_factory=Rate)
    traffic_percent: float | None = None
    """The last published value."""

    @property
    def waiting(self) -> bool:
        return self.waits.filter.waits if self.watch is None else self.watch.waits


class Contention:
    """Samples of one node and its tasks. `memory_mb_s`: bandwidth of its memory; None: not known."""

    def __init__(self, meters: Meters, sample: Sample, memory_mb_s: float | None) -> None:
        self._meters = meters
        self._sample = sample
        self._capacity = Capacity(memory_mb_s)
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Key, _Followed] = {}
        self._node: _Followed | None = None

    def follow(self, key: Key, shim: int, groups: tuple[str, ...]) -> None:
        """A task runs, in these cgroups. It is watched from the next tick on: a trigger costs the kernel 16
        ms at a task's end."""
        self._node = self._node or _Followed()
        self._tasks[key] = _Followed(shim, groups)
        self._meters.follow_traffic(key, shim)

    def forget(self, key: Key) -> None:
        """It has ended. With the last one no thread waits here."""
        if (task := self._tasks.pop(key, None)) is not None:
            self._meters.forget_traffic(key)
            if task.watch is not None:
                task.watch.close()
        if not self._tasks and self._node is not None:
            if self._node.waiting:
                self._sample(None, cpu_stalled_percent=0.0)
            if self._node.traffic_percent:
                self._sample(None, memory_bandwidth_percent=0.0)
            self.close()

    def close(self) -> None:
        """No more samples; counters of running tasks stay, for the next reporter."""
        for followed in (*self._tasks.values(), self._node):
            if followed is not None and followed.watch is not None:
                followed.watch.close()
        self._tasks.clear()
        self._node = None

    def tick(self) -> None:
        """Measures tasks without a trigger."""
        now_s, highest = self._loop.time(), None
        for key, task in self._tasks.items():
            self._see(task, key[0])
            if task.watch is None:
                percent = task.waits.percent(self._meters.waits(task.shim), now_s)
                highest = percent if highest is None or percent is None else max(highest, percent)
                self._stalled(task, key[0], percent, now_s)
            self._traffic(task, key, now_s)
        if self._node is not None:
            self._see(self._node, None)
            if self._node.watch is None and highest is not None:
                self._stalled(self._node, None, highest, now_s)
            self._traffic(self._node, None, now_s)

    def _see(self, task: _Followed, task_id: str | None) -> None:
        """At the first tick a trigger is armed, where the kernel has one."""
        if task.seen:
            return
        task.seen = True
        if (trigger := self._meters.pressure(task.groups)) is not None:
            task.watch = PressureWatch(
                trigger, lambda percent: self._sample(task_id, cpu_stalled_percent=percent)
            )

    def _stalled(self, task: _Followed, task_id: str | None, percent: float | None, now_s: float) -> None:
        if percent is not None and task.waits.filter.passes(percent, now_s):
            self._sample(task_id, cpu_stalled_percent=percent)

    def _traffic(self, task: _Followed, key: Key | None, now_s: float) -> None:
        mb_s = task.traffic.mb_s(self._meters.traffic(key), now_s)
        if mb_s is None:
            return
        percent, last = self._capacity.percent(mb_s), task.traffic_percent
        if last is None or abs(percent - last) >= MIN_CHANGE_POINTS:
            task.traffic_percent = percent
            self._sample(None if key is None else key[0], memory_bandwidth_percent=percent)
