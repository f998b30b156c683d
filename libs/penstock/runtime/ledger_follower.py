"""Follows a cell's ledger: folds what comes into a replica, shows each fact to its owner, and counts the ledger's time on.

For services that hold nothing that the log does not have: after any failure they fold anew (crash-only).
"""

from collections.abc import Callable, Sequence
from functools import partial

from penstock.clock import ReadersClock
from penstock.errors import LogError
from penstock.ledger.evolve import evolve
from penstock.ledger.record import RawRecord
from penstock.ledger.replica import Replica
from penstock.ledger.state import CellState
from penstock.log.port import Record
from penstock.model.event import Event
from penstock.runtime.crash_only import applying

BATCH_MS = (
    20  # of readers: under load a poll costs more than the records that it brings; after idle nothing waits
)
MAX_VOIDS = 256  # of placers that are not in office any more; beyond, the ledger was restored from an older copy, and goes on otherwise


class LedgerFollower:
    """`see`: gets each fact after that was folded."""

    def __init__(self, replica: Replica, see: Callable[[CellState, Event], None]) -> None:
        self.clock = ReadersClock()
        self._replica = replica
        self._see = see
        self._voids = 0
        """Void records in a row, since the latest valid one."""

    @property
    def state(self) -> CellState:
        return self._replica.state

    @property
    def offset(self) -> int:
        """Of the next record."""
        return self._replica.offset

    @property
    def seq(self) -> int:
        """Of the latest valid record."""
        return self._replica.head.seq

    def until_s(self, due_ms: int | None) -> float | None:
        """How long it is until this ledger time, 0 where it is over; None: for ever, where there is none."""
        return None if due_ms is None else max(0.0, (due_ms - self.clock.now_ms()) / 1_000)

    def fold(self, records: Sequence[Record], *, new: bool) -> None:
        """`new`: they come now; else they were in the log before. Raises `LogError` where none follows what was folded."""
        for record in records:
            place = f"ledger offset {record.offset}"
            take = partial(self._replica.take, record.value, record.offset, self._fact)
            if applying(place, take) is not None:
                self.clock.read(self.state.now_ms, None if new else record.timestamp_ms)
                self._voids = 0
            else:
                self._voids += 1
        if self._voids > MAX_VOIDS:
            raise LogError(f"{self._voids} records in a row do not follow seq {self.seq}")

    def _fact(self, record: RawRecord, n: int, fact: Event) -> None:
        evolve(self.state, fact)
        self._see(self.state, fact)
