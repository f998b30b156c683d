"""What the machine gives: two cores, a calibration, and the CPU time that a group of processes used."""

import os
from collections.abc import Iterable, Iterator
from time import perf_counter, process_time

import psutil

CORES = 2
CALIBRATION_LOOPS = 200_000
CALIBRATION_REPEATS = 7


def keep_to_two_cores() -> None:
    """This process and all that it starts; the targets are for two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def calibrate_ms() -> tuple[float, float]:
    """(best, median) wall time of a fixed piece of pure Python, ms.

    The best is the speed of a core; a median far above it shows that somebody else is using the cores.
    """
    times_ms = []
    for _ in range(CALIBRATION_REPEATS):
        began = perf_counter()
        table: dict[int, int] = {}
        for number in range(CALIBRATION_LOOPS):
            table[number & 1023] = table.get(number & 511, 0) + number
        times_ms.append((perf_counter() - began) * 1_000)
    times_ms.sort()
    return times_ms[0], times_ms[len(times_ms) // 2]


class Cpu:
    """CPU seconds, per name, since the object was made; a process counts with all its living descendants."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._start = dict(self._read())
        self._busy_s = _busy_s()
        self._began_s = perf_counter()

    def used_s(self) -> dict[str, float]:
        """CPU seconds of each."""
        return {name: now - self._start[name] for name, now in self._read()}

    def others_cores(self) -> float:
        """Cores that everybody else used meanwhile, on average; the hypervisor's steal included."""
        busy_s = _busy_s() - self._busy_s - sum(self.used_s().values())
        return max(0.0, busy_s / (perf_counter() - self._began_s))

    def _read(self) -> Iterator[tuple[str, float]]:
        own = set(self._pids.values())
        for name, pid in self._pids.items():
            if pid == os.getpid():
                yield name, process_time()
                continue
            process = psutil.Process(pid)
            family = [process, *(child for child in process.children(recursive=True) if child.pid not in own)]
            yield name, sum(_seconds(one) for one in family)


def _busy_s() -> float:
    """Of all cores since boot."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _seconds(process: psutil.Process) -> float:
    """With what its reaped children used."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
