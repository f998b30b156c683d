"""Read replica of one cell's ledger: the valid chain so far and the state folded from it."""

from dataclasses import dataclass, field

import msgspec

from penstock.ledger.fold.evolve import Hook, begin, fold
from penstock.ledger.record.record import GENESIS, Head, RawCause, RawRecord, read_valid
from penstock.ledger.state.state import CellState
from penstock.model.schema.event import Event


@dataclass(slots=True)
class Replica:
    """A fold of one cell's ledger. Starts empty, or from a snapshot."""

    state: CellState = field(default_factory=CellState)
    head: Head = GENESIS
    offset: int = 0
    """Offset of the next record to read in the ledger's partition."""
    head_offset: int = -1
    """Offset of `head`'s record in the ledger's partition; -1: there is none."""

    def take(self, value: bytes, offset: int, hook: Hook | None = None) -> RawRecord | None:
        """Folds one record of the partition and returns it; None for a void one, which only advances the
        offset.

        `hook` folds each fact in place of `evolve`: for readers that derive something from single facts.
        Raises `UndecodableRecord`, and stays where it was; `UnfoldableRecord`, and is of no more use.
        """
        found = read_valid(self.head, value)
        if found is None:
            self.offset = offset + 1
            return None
        head, record = found
        fold(self.state, record, hook, offset)
        self.head, self.offset, self.head_offset = head, offset + 1, offset
        return record

    def take_fact(self, seq: int, now_ms: int, fact: Event, hook: Hook) -> None:
        """Folds one fact of record `seq`, from a stream without the records: it has no chain."""
        term = self.state.term
        begin(self.state, seq, now_ms, term)
        hook(RawRecord(seq, "", term, now_ms, RawCause(), "", None, (), msgspec.Raw()), 0, fact)
