"""How far forecasts of waiting times were off, learned from this cell's own: each is compared with what came
of it once the job has its place.

The forecast (`penstock.why.forecast`) knows no job that comes later. Under an order by slack or by remaining
time such jobs go first, under others none does, so how far it is off depends on the profile and on the load.
It is learned as a factor of the waiting time, from the newest forecasts alone, in memory: after a restart it
is learned anew.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

NEWEST = 32
LEAST = 8  # fewer show no spread
SOON_MS = 1_000  # added to both times, so that a wait of some milliseconds is no large factor of none
MAX_OPEN = 4_096  # forecasts of jobs that still wait


class ForecastErrors:
    """`asked` and `placed` are called for each forecast and each placement; a job that had to wait is
    compared once."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Job → (time of the forecast, forecast start)."""
        self._factors: deque[float] = deque(maxlen=NEWEST)

    def asked(self, job_id: str, now_ms: int, starts_ms: int) -> None:
        """A forecast was made for a job of the queue;
        one by which it starts at once says nothing about waits."""
        if starts_ms > now_ms:
            self._open.setdefault(job_id, (now_ms, starts_ms))
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def placed(self, job_id: str, at_ms: int) -> None:
        """The job has its place."""
        if (found := self._open.pop(job_id, None)) is not None:
            now_ms, starts_ms = found
            self._factors.append((max(0, at_ms - now_ms) + SOON_MS) / (starts_ms - now_ms + SOON_MS))

    def forget(self, job_id: str) -> None:
        """It has ended without a place, or a user holds it: its wait is not the queue's."""
        self._open.pop(job_id, None)

    def starts(self, now_ms: int, starts_ms: int) -> Sequence[int]:
        """Starts that are equally likely where this one is forecast; the forecast alone where too little is
        known, or it starts at once."""
        if len(self._factors) < LEAST or starts_ms <= now_ms:
            return (starts_ms,)
        return [now_ms + round((starts_ms - now_ms) * factor) for factor in self._factors]

    @property
    def learned(self) -> int:
        """Number of forecasts that `starts` rests on."""
        return len(self._factors) if len(self._factors) >= LEAST else 0
