"""Sampler of running tasks' utilisation: sampled on the node while tasks run, published when it has changed.

There is no event for utilisation, so this is the only value that is polled (architecture §8); a node without
tasks has no timer. Waiting for cores is reported by the kernel where possible (`contention`).
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.clock import wall_ms
from penstock.model.external_events import TelemetrySampled
from penstock.model.types import Usage
from penstock.model.validation import checked
from penstock_services.node_reporter.shell.contention import Contention
from penstock_services.node_reporter.shell.ports import Key, Meters

PERIOD_S = 2.0
MIN_CHANGE_POINTS = 10.0  # of utilisation, in percentage points
MIN_CHANGE_SHARE = 0.05  # of memory, relative to the last published value
PROMISE_MARGIN = 1.1  # of the promise of memory on a shared GPU: frameworks do not count the CUDA context
OVER_TICKS = 2  # in a row: a single one may be due to another process
MAX_SAMPLES = 4_096  # per task for mean and deviation; then every second one is dropped


@dataclass(slots=True)
class _Followed:
    shim: int
    gpus: Mapping[int, str]
    promised_mib: int = 0
    """Of each of its shared GPUs; 0: it has them alone."""
    over: int = 0
    """Ticks in a row beyond its promise."""
    evidence: str = ""
    """Why it was killed; empty: it was not."""
    cpu_s: float = 0.0
    at_s: float = 0.0
    published: dict[str, float] = field(default_factory=dict)
    utilisation: list[float] = field(default_factory=list)
    gpu_memory_mib: int = 0
    host_memory_mib: int = 0


class Sampler:
    """Follows tasks of this node from start to end. `publish` receives changed values; `kill` is called for a task that holds more of a
    shared GPU than it was promised, at each tick until it has ended: its neighbours were promised the rest. `memory_mb_s`: bandwidth of the
    node's memory; None: not known."""

    def __init__(
        self,
        node_id: str,
        meters: Meters,
        publish: Callable[[TelemetrySampled], None],
        kill: Callable[[Key], None],
        memory_mb_s: float | None = None,
    ) -> None:
        self._kill = kill
        self._node_id = node_id
        self._meters = meters
        self._contention = Contention(meters, self._sample, memory_mb_s)
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._followed: dict[Key, _Followed] = {}
        self._timer: asyncio.TimerHandle | None = None

    def follow(
        self,
        key: Key,
        shim: int,
        gpus: Mapping[int, str],
        promised_mib: int = 0,
        groups: tuple[str, ...] = (),
    ) -> None:
        """A task runs under this shim, in these cgroups. `gpus`: the slots that it holds, with their UUIDs; `promised_mib`: of each, 0 where it has them alone."""
        self._contention.follow(key, shim, groups)
        self._followed[key] = _Followed(shim, gpus, promised_mib, at_s=self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def forget(self, key: Key) -> tuple[Usage, str]:
        """It has ended. Returns its measurements, None where nothing was measured, and why it was killed here; empty: it was not."""
        task = self._followed.pop(key, None)
        self._contention.forget(key)
        if not self._followed:
            self.close()
        if task is None:
            return Usage(), ""
        samples = task.utilisation
        usage = Usage(
            host_memory_mib=task.host_memory_mib or None,
            gpu_memory_mib=task.gpu_memory_mib if samples else None,
            gpu_utilisation_percent=statistics.fmean(samples) if samples else None,
            gpu_utilisation_std=statistics.pstdev(samples) if samples else None,
        )
        return usage, task.evidence

    def close(self) -> None:
        """No more samples."""
        self._contention.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._tick)
        for key, task in list(self._followed.items()):
            now_s = self._loop.time()
            cpu_s, memory_mib = self._meters.use(task.shim)
            percent = 100 * max(0.0, cpu_s - task.cpu_s) / max(now_s - task.at_s, 1e-3)
            task.cpu_s, task.at_s = cpu_s, now_s
            task.host_memory_mib = max(task.host_memory_mib, memory_mib)
            if _changed(task.published, "cpu", percent) | _changed(task.published, "memory", memory_mib):
                self._sample(key[0], cpu_percent=percent, host_memory_mib=memory_mib)
            for slot, uuid in task.gpus.items():
                self._gpu(key[0], task, slot, uuid)
            self._enforce_promise(key, task)
        self._contention.tick()

    def _gpu(self, task_id: str, task: _Followed, slot: int, uuid: str) -> None:
        measured = self._meters.gpu(uuid)
        if measured is None:
            return
        percent, memory_mib = measured
        if task.promised_mib:
            memory_mib = self._own(task, uuid, memory_mib)
        task.utilisation.append(percent)
        if len(task.utilisation) > MAX_SAMPLES:
            del task.utilisation[::2]
        task.gpu_memory_mib = max(task.gpu_memory_mib, memory_mib)
        changed = _changed(task.published, f"gpu{slot}", percent)
        if _changed(task.published, f"memory{slot}", memory_mib) or changed:
            self._sample(task_id, gpu=slot, gpu_utilisation_percent=percent, gpu_memory_mib=memory_mib)

    def _own(self, task: _Followed, uuid: str, device_mib: int) -> int:
        """Its own memory of a shared GPU, and a strike if that is too much; where that cannot be measured, that of all tasks."""
        own_mib = self._meters.gpu_memory_of(task.shim, uuid)
        if own_mib is None:
            return device_mib
        task.over = task.over + 1 if own_mib > PROMISE_MARGIN * task.promised_mib else 0
        return own_mib

    def _enforce_promise(self, key: Key, task: _Followed) -> None:
        if task.over >= OVER_TICKS:
            task.evidence = f"stopped by its node: it held {task.gpu_memory_mib} MiB of a shared GPU, and was promised {task.promised_mib}"
            self._kill(key)

    def _sample(self, task_id: str | None, **measured: float) -> None:
        fields = {"node_id": self._node_id, "task_id": task_id, "at_ms": wall_ms(), **measured}
        self._publish(checked(TelemetrySampled, fields))


def _changed(published: dict[str, float], name: str, value: float) -> bool:
    """Whether to publish it: memory changes count relatively, utilisation in points. Records the value as published."""
    last = published.get(name)
    if last is not None:
        relative = name.startswith("memory")
        if abs(value - last) < (max(last * MIN_CHANGE_SHARE, 1) if relative else MIN_CHANGE_POINTS):
            return False
    published[name] = value
    return True
