"""Digests of the folded state: whoever has folded the ledger up to a record has the same one.

The placer states the digest of its own state in every `DIGEST_EVERY`-th record, and each reader compares its
own. Ideal: all of the state each time. Departure: a digest must not hold up decisions, so of a mapping with
more than `WINDOW` entries it covers one window, the next one at the next digest; a difference there shows
within one round.
"""

from collections.abc import Mapping
from hashlib import sha256
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.snapshot import fields_of, format_id, ordered
from penstock.ledger.state.state import CellState, Timer

DIGEST_EVERY = 2_000
"""Records. With 1,000 nodes, 10,000 jobs and 100,000 remembered ids a digest takes 2.3 ms (4.7 ms with 20,000
timers): 1.2 µs per record, of some 85 that deciding one takes."""
WINDOW = 64
"""Entries of one mapping; so that a digest takes milliseconds."""
DIGITS = 32  # hex, as of a record's id


def digest(state: CellState) -> str:
    """Format of the state (`format_id`) and 32 hex digits, the same in every process."""
    turn, found = state.seq // DIGEST_EVERY, sha256()
    for name, value in ordered(state).items():
        part = _window(value, turn) if isinstance(value, dict) else value
        if name == "nodes":
            part = {node_id: fields_of(node) for node_id, node in part.items()}
        elif name == "timers":
            part = _timers(value, turn)
        found.update(msgspec.json.encode((name, part)))
    return f"{format_id()}-{found.hexdigest()[:DIGITS]}"


def _window(entries: Mapping[str, Any], turn: int) -> Mapping[str, Any]:
    windows = -(-len(entries) // WINDOW)
    if windows <= 1:
        return entries
    start = turn % windows * WINDOW
    return dict(islice(entries.items(), start, start + WINDOW))


def _timers(timers: Mapping[str, Timer], turn: int) -> list[tuple[str, Timer]]:
    """Those of a window by their time: to sort all takes longer than the rest of a digest."""
    windows = max(1, -(-len(timers) // WINDOW))
    found = [entry for entry in timers.items() if entry[1].at_ms % windows == turn % windows]
    return sorted(found, key=itemgetter(0))


def round_of(state: CellState) -> int:
    """Records within which digests cover the whole state, if it stays as large."""
    largest = max(len(value) for value in fields_of(state).values() if isinstance(value, dict))
    return DIGEST_EVERY * max(1, -(-largest // WINDOW))


def restated(state: CellState, stated: str) -> str:
    """What a record states about this state; `stated` itself where that is of another version's format."""
    return digest(state) if stated.startswith(format_id()) else stated


def difference(state: CellState, record: RawRecord) -> str:
    """The digest of this state, if the record that was folded last states another one; else empty."""
    if not record.digest or bytes(record.amended):
        return ""
    own = restated(state, record.digest)
    return "" if own == record.digest else own
