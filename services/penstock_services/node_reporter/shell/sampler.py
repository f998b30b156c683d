"""How much running tasks use: sampled on the node while tasks run, published when it has changed.

There is no event for utilisation, so this is the one thing that is looked at periodically (architecture §8);
a node without tasks has no timer.
"""

import asyncio
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pynvml

from penstock.clock import wall_ms
from penstock.model.external_events import TelemetrySampled
from penstock.model.types import Usage

PERIOD_S = 2.0
MIN_CHANGE_POINTS = 10.0  # of utilisation, in percentage points
MIN_CHANGE_SHARE = 0.05  # of memory, relative to what was published last
MAX_SAMPLES = 4_096  # per task for mean and deviation; then every second one is dropped
BYTES_PER_MIB = 1 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Key = tuple[str, int]


@dataclass(slots=True)
class _Followed:
    shim: int
    gpus: tuple[int, ...]
    ticks: int = 0
    at_s: float = 0.0
    told: dict[str, float] = field(default_factory=dict)
    utilisation: list[float] = field(default_factory=list)
    gpu_memory_mib: int = 0
    host_memory_mib: int = 0


class Sampler:
    """Follows tasks from start to end. `publish` gets what has changed; `real_gpus`: NVML may be asked."""

    def __init__(self, node_id: str, publish: Callable[[TelemetrySampled], None], *, real_gpus: bool) -> None:
        self._node_id = node_id
        self._publish = publish
        self._real_gpus = real_gpus
        self._loop = asyncio.get_running_loop()
        self._followed: dict[Key, _Followed] = {}
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, key: Key, shim: int, gpus: tuple[int, ...]) -> None:
        """A task runs under this shim."""
        self._followed[key] = _Followed(shim, gpus if self._real_gpus else (), at_s=self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def forget(self, key: Key) -> Usage:
        """It has ended; what was seen of it, None where nothing was."""
        task = self._followed.pop(key, None)
        if not self._followed:
            self.close()
        if task is None:
            return Usage()
        samples = task.utilisation
        return Usage(
            host_memory_mib=task.host_memory_mib or None,
            gpu_memory_mib=task.gpu_memory_mib if samples else None,
            gpu_utilisation_percent=statistics.fmean(samples) if samples else None,
            gpu_utilisation_std=statistics.pstdev(samples) if samples else None,
        )

    def close(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._tick)
        for key, task in self._followed.items():
            now_s = self._loop.time()
            ticks, memory_mib = _measure(task.shim)
            percent = 100 * max(0, ticks - task.ticks) / TICKS_PER_S / max(now_s - task.at_s, 1e-3)
            task.ticks, task.at_s = ticks, now_s
            task.host_memory_mib = max(task.host_memory_mib, memory_mib)
            if _changed(task.told, "cpu", percent) | _changed(task.told, "memory", memory_mib):
                self._tell(key[0], cpu_percent=percent, host_memory_mib=memory_mib)
            for gpu in task.gpus:
                with suppress(pynvml.NVMLError):
                    self._gpu(key[0], task, gpu)

    def _gpu(self, task_id: str, task: _Followed, gpu: int) -> None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        percent = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).used // BYTES_PER_MIB
        task.utilisation.append(percent)
        if len(task.utilisation) > MAX_SAMPLES:
            del task.utilisation[::2]
        task.gpu_memory_mib = max(task.gpu_memory_mib, memory_mib)
        changed = _changed(task.told, f"gpu{gpu}", percent) | _changed(task.told, f"memory{gpu}", memory_mib)
        if changed:
            self._tell(task_id, gpu=gpu, gpu_utilisation_percent=percent, gpu_memory_mib=memory_mib)

    def _tell(self, task_id: str, **measured: float) -> None:
        fields = {"node_id": self._node_id, "task_id": task_id, "at_ms": wall_ms(), **measured}
        self._publish(TelemetrySampled.model_validate(fields))


def _changed(told: dict[str, float], name: str, value: float) -> bool:
    """Whether it is worth telling; memory counts relatively, utilisation in points. Remembers what it tells."""
    last = told.get(name)
    if last is not None:
        relative = name.startswith("memory")
        if abs(value - last) < (max(last * MIN_CHANGE_SHARE, 1) if relative else MIN_CHANGE_POINTS):
            return False
    told[name] = value
    return True


def _measure(shim: int) -> tuple[int, int]:
    """CPU ticks and resident MiB of everything below a shim, without looking at other processes."""
    ticks = pages = 0
    queue = [shim]
    while queue:
        pid = queue.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    queue += map(int, file.read().split())
            if pid != shim:
                with open(f"/proc/{pid}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                ticks += sum(map(int, fields[11:15]))
                pages += int(fields[21])
    return ticks, pages * PAGE_BYTES // BYTES_PER_MIB
