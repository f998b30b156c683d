"""Cursor into the stream of events: `seq.n`, the n-th event of the ledger's record seq."""

import re
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
    if found := re.fullmatch(r"([0-9]{1,16})(?:\.([0-9]{1,7}))?", text.strip()):
        cursor = Cursor(int(found[1]), MAX_N if found[2] is None else int(found[2]))
        if cursor.seq <= MAX_SEQ and cursor.n <= MAX_N:
            return cursor
    wrong = f"{text[:64]!r} is not an event id"
    raise invalid(
        "no place in the stream",
        [BadField(field, wrong, "give the last id that you received, such as 17.2")],
    )
