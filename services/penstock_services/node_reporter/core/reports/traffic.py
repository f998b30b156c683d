"""Memory bandwidth in use, from byte counters (resctrl, MBM), and in percent of the node's capacity."""

from collections.abc import Mapping

BYTES_PER_MB = 1_000_000
LEAST_CAPACITY_MB_S = 20_000.0  # one channel of DDR4-2400; no server has less


class Rate:
    """MB/s of one group of tasks, from its counters: one per memory controller (L3 domain)."""

    __slots__ = ("_at_s", "_counters")

    def __init__(self) -> None:
        self._counters: Mapping[str, int] = {}
        self._at_s = 0.0

    def mb_s(self, counters: Mapping[str, int], now_s: float) -> float | None:
        """Mean since the last call. None: at the first call, and where a counter is missing, is new or has
        gone back since, as after a reset; a sum over the others would look like a fall in traffic.
        `counters`: bytes by counter; `now_s`: monotonic."""
        before, passed_s = self._counters, now_s - self._at_s
        self._counters, self._at_s = counters, now_s
        if not counters or counters.keys() != before.keys() or passed_s <= 0:
            return None
        deltas = [counters[name] - before[name] for name in counters]
        if min(deltas) < 0:
            return None
        return sum(deltas) / BYTES_PER_MB / passed_s


class Capacity:
    """Memory bandwidth of the node, MB/s. `given`: by the operator;
    None: the largest measured, at least `LEAST_CAPACITY_MB_S`."""

    __slots__ = ("_given", "_seen")

    def __init__(self, given: float | None) -> None:
        self._given = given
        self._seen = LEAST_CAPACITY_MB_S

    def percent(self, mb_s: float) -> float:
        """Percent of the node's capacity, ≥ 0; above 100 where the operator's figure is too low."""
        if self._given is not None:
            return 100 * mb_s / self._given
        self._seen = max(self._seen, mb_s)
        return 100 * mb_s / self._seen
