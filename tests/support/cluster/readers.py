"""The fold of each service that reads the ledger, without its process."""

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.state import CellState
from penstock.model.inputs.amendments import LedgerAmended
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock_services.batcher.core.batcher import Batcher
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.estimator.core.fold.state import State
from penstock_services.gateway.shell.replica.follower import Follower
from penstock_services.migrator.core.migrator import Migrator
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import LARGEST, REPLACED, _json, _saturate


class Readers:
    """Batcher, contention-guard, migrator, gateway, projector and estimator, on records as they are in the
    log."""

    def __init__(self) -> None:
        self.batcher, self.guard, self.migrator = Batcher(), ContentionGuard(), Migrator()
        self.cell, self.gateway = Replica(), Follower(Replica())
        self.projection, self.estimator = Projection(Replica()), State(Topic.JOBS, 0)
        self.values: list[bytes] = []
        """What they have read."""

    def take(self, value: bytes) -> None:
        """The next record, by all of them, and the rows that it leads to."""
        assert len(value) <= LedgerAmended.MAX_BYTES, "the log holds no larger record"
        offset = len(self.values)
        self.values.append(value)
        assert self.cell.take(value, offset, self._see) is not None
        assert self.gateway.replica.take(value, offset, self.gateway._fold) is not None
        assert self.estimator.fold(value, offset)
        assert self.projection.take(value, offset)
        batch = self.projection.drain()
        for table in REPLACED:
            for row in batch[table]:
                numbers = {name: LARGEST["bigint"] for name, found in row.items() if type(found) is int}
                _saturate([row], numbers)
            _json(batch[table])
        _json([row["data"] for row in batch["events"]])

    def agree_with(self, state: CellState) -> None:
        """Every fold is the placer's own, and a snapshot holds all of it."""
        own = dump(state)
        for reader in (self.cell, self.gateway.replica, self.projection.replica, self.estimator.replica):
            assert dump(reader.state) == own
            assert reader.head == self.cell.head
        assert dump(load(own)) == own

    def _see(self, record: RawRecord, n: int, fact: Event) -> None:
        state = self.cell.state
        evolve(state, fact)
        self.batcher.see(fact)
        self.guard.see(state, fact, state.now_ms)
        self.migrator.see(state, fact, state.now_ms)
