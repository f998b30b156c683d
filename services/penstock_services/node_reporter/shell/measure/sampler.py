"""Sampler of running tasks' utilisation: sampled on the node while tasks run, published when it has changed.

There is no event for utilisation, so this is the only value that is polled (architecture §8); a node without
tasks has no timer. Waiting for cores is reported by the kernel where possible (`contention`).
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.clock import wall_ms
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.types import Usage
from penstock.model.schema.validation import checked
from penstock_services.node_reporter.shell.measure.contention import Contention
from penstock_services.node_reporter.shell.ports import Key, Meters

PERIOD_S = 2.0
MIN_CHANGE_POINTS = 10.0  # of utilisation, in percentage points
MIN_CHANGE_SHARE = 0.05  # of memory, relative to the last published value
PROMISE_MARGIN = 1.1  # of the limit of memory on a shared GPU: frameworks do not count the CUDA context
OVER_TICKS = 2  # in a row: a single one may be due to another process
MAX_SAMPLES = 4_096  # per task for mean and deviation; then every second one is dropped


@dataclass(slots=True)
class _Followed:
    shim: int
    gpus: Mapping[int, str]
    keeps: bool = False
    """Whether it had its GPUs alone without a limit,
    and so keeps what it holds there when another task comes."""
    limit_mib: int = 0
    """Of each of its GPUs, since the latest tick at which another task had a part of them; 0: it has had them
    alone since."""
    over: int = 0
    """Ticks in a row beyond its limit."""
    evidence: str = ""
    """Why it was killed; empty: it was not."""
    cpu_s: float = 0.0
    at_s: float = 0.0
    published: dict[str, float] = field(default_factory=dict)
    utilisation: list[float] = field(default_factory=list)
    gpu_memory_mib: int = 0
    host_memory_mib: int = 0


class Measured(NamedTuple):
    """What was found about a task that has ended."""

    usage: Usage
    """Its measurements, None where nothing was measured."""
    evidence: str
    """Why this node killed the task; empty: it did not."""
    limit_mib: int
    """GPU memory limit in MiB when the task ended; 0: exclusive GPU."""


class Sampler:
    """Follows tasks of this node from start to end. `publish` receives changed values. `promised`, of a
    task's id and token: the memory that it may hold on each of its GPUs, 0 while it has them alone. `kill` is
    called for a task that holds more, at each tick until it has ended: the rest was promised to other tasks.
    `memory_mb_s`: bandwidth of the node's memory; None: not known."""

    def __init__(
        self,
        node_id: str,
        meters: Meters,
        publish: Callable[[TelemetrySampled], None],
        kill: Callable[[Key], None],
        promised: Callable[[str, int], int],
        memory_mb_s: float | None = None,
    ) -> None:
        self._kill = kill
        self._promised = promised
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
        limited: bool = False,
        groups: tuple[str, ...] = (),
    ) -> None:
        """A task runs under this shim, in these cgroups. `gpus`: the slots that it holds, with their UUIDs;
        `limited`: its frameworks have limited its memory on them since its start. Else it keeps what it holds
        when another task comes, though that is more than it was promised."""
        self._contention.follow(key, shim, groups)
        self._followed[key] = _Followed(shim, gpus, keeps=not limited, at_s=self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def forget(self, key: Key) -> Measured:
        """It has ended."""
        task = self._followed.pop(key, None)
        self._contention.forget(key)
        if not self._followed:
            self.close()
        if task is None:
            return Measured(Usage(), "", 0)
        samples = task.utilisation
        usage = Usage(
            host_memory_mib=task.host_memory_mib or None,
            gpu_memory_mib=task.gpu_memory_mib if samples else None,
            gpu_utilisation_percent=statistics.fmean(samples) if samples else None,
            gpu_utilisation_std=statistics.pstdev(samples) if samples else None,
        )
        return Measured(usage, task.evidence, task.limit_mib or self._promised(*key))

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
            promised_mib = self._promised(*key) if task.gpus else 0
            held = [self._gpu(key[0], task, *gpu, shared=promised_mib > 0) for gpu in task.gpus.items()]
            known = [own_mib for own_mib in held if own_mib is not None]
            self._enforce_limit(key, task, promised_mib, max(known, default=None))
        self._contention.tick()

    def _gpu(self, task_id: str, task: _Followed, slot: int, uuid: str, *, shared: bool) -> int | None:
        """Returns its own memory of a shared GPU, MiB;
        None where it has the GPU alone, or that cannot be measured."""
        measured = self._meters.gpu(uuid)
        if measured is None:
            return None
        percent, memory_mib = measured
        own_mib = self._meters.gpu_memory_of(task.shim, uuid) if shared else None
        if own_mib is not None:
            memory_mib = own_mib
        task.utilisation.append(percent)
        if len(task.utilisation) > MAX_SAMPLES:
            del task.utilisation[::2]
        task.gpu_memory_mib = max(task.gpu_memory_mib, memory_mib)
        changed = _changed(task.published, f"gpu{slot}", percent)
        if _changed(task.published, f"memory{slot}", memory_mib) or changed:
            self._sample(task_id, gpu=slot, gpu_utilisation_percent=percent, gpu_memory_mib=memory_mib)
        return own_mib

    def _enforce_limit(self, key: Key, task: _Followed, promised_mib: int, held_mib: int | None) -> None:
        """`held_mib`: on the GPU on which it holds most; None: not known."""
        if not promised_mib:
            task.keeps = task.keeps or task.limit_mib > 0
            task.limit_mib = task.over = 0
        elif held_mib is not None:
            if not task.limit_mib:
                task.limit_mib = max(promised_mib, held_mib) if task.keeps else promised_mib
            task.over = task.over + 1 if held_mib > PROMISE_MARGIN * task.limit_mib else 0
        if task.over >= OVER_TICKS and not task.evidence:
            more = f", after {task.limit_mib} alone" if task.limit_mib > promised_mib else ""
            task.evidence = (
                f"stopped by its node: it held {held_mib} MiB of a shared GPU{more}, and was "
                f"promised {promised_mib}"
            )
        if task.evidence:
            self._kill(key)

    def _sample(self, task_id: str | None, **measured: float) -> None:
        fields = {"node_id": self._node_id, "task_id": task_id, "at_ms": wall_ms(), **measured}
        self._publish(checked(TelemetrySampled, fields))


def _changed(published: dict[str, float], name: str, value: float) -> bool:
    """Whether to publish it: memory changes count relatively, utilisation in points.
    Records the value as published."""
    last = published.get(name)
    if last is not None:
        relative = name.startswith("memory")
        if abs(value - last) < (max(last * MIN_CHANGE_SHARE, 1) if relative else MIN_CHANGE_POINTS):
            return False
    published[name] = value
    return True
