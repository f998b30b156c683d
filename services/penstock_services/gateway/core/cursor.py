"""Places in the stream of events: `seq.n`, the n-th event of the ledger's record seq."""

from typing import NamedTuple

from penstock_services.gateway.core.problems import BadField, invalid

MAX_SEQ = (1 << 53) - 1
MAX_N = 1 << 20


class Cursor(NamedTuple):
    """After this event. `n` = MAX_N: after the whole record."""

    seq: int
    n: int


def read_cursor(text: str, field: str) -> Cursor:
    """`17.2` or `17` (all of record 17). Raises `Problem` with status 400."""
    seq, dot, n = text.strip().partition(".")
    if seq.isascii() and seq.isdigit() and (not dot or (n.isascii() and n.isdigit())) and len(text) <= 32:
        cursor = Cursor(int(seq), int(n) if dot else MAX_N)
        if cursor.seq <= MAX_SEQ and cursor.n <= MAX_N:
            return cursor
    raise invalid(
        "no place in the stream",
        [
            BadField(
                field, f"{text[:64]!r} is no event id", "give the last id that you received, such as 17.2"
            )
        ],
    )
