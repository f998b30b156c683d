"""Follower of a cell's ledger: folds new records into a replica, passes each event to a callback, and
extrapolates the ledger's time.

For services whose whole state follows from the log: after any failure they fold from the start (crash-only).
"""

from collections.abc import Callable, Sequence
from functools import partial

from penstock.clock import ReadersClock
from penstock.errors import LogError
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Record
from penstock.model.schema.event import Event
from penstock.runtime.crash_only import applying
from penstock.runtime.following.state_digests import compare

BATCH_MS = (
    20  # of readers: under load a poll costs more than its records; after an idle moment no record is delayed
)
# records by superseded placers; more in a row: the ledger was restored from an older copy and has diverged
MAX_VOIDS = 256


class LedgerFollower:
    """`see` gets each event after it was folded. `service`: who follows."""

    def __init__(
        self, log: Log, service: str, replica: Replica, see: Callable[[CellState, Event], None]
    ) -> None:
        self._log, self._service = log, service
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
        """Offset of the next record."""
        return self._replica.offset

    @property
    def seq(self) -> int:
        """`seq` of the latest valid record."""
        return self._replica.head.seq

    def until_s(self, due_ms: int | None) -> float | None:
        """Seconds until this ledger time, 0 if it has passed; None: for ever, if no time is given."""
        return None if due_ms is None else max(0.0, (due_ms - self.clock.now_ms()) / 1_000)

    async def fold(self, records: Sequence[Record], *, new: bool) -> None:
        """Folds records. `new`: they were just written, not in the log before; then digests are compared.
        Raises `LogError`, also after `MAX_VOIDS` void ones in a row."""
        for record in records:
            place = f"ledger offset {record.offset}"
            take = partial(self._replica.take, record.value, record.offset, self._fact)
            if (taken := applying(place, take)) is not None:
                if new:
                    await compare(self._log, self._service, self.state, taken, record)
                self.clock.read(self.state.now_ms, None if new else record.timestamp_ms)
                self._voids = 0
            else:
                self._voids += 1
        if self._voids > MAX_VOIDS:
            raise LogError(f"{self._voids} records in a row do not follow seq {self.seq}")

    def _fact(self, record: RawRecord, n: int, fact: Event) -> None:
        evolve(self.state, fact)
        self._see(self.state, fact)
