"""Reader of JSON Lines: files of ledger records, or of events that the gateway streamed."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20  # far above a record; a longer line comes in pieces, which are not valid JSON


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes without the line's end) of each line that is not blank;
    `-` is stdin. Raises `OSError`."""
    with ExitStack() as stack:
        file: BinaryIO = sys.stdin.buffer if str(path) == "-" else stack.enter_context(path.open("rb"))
        number = 0
        while value := file.readline(MAX_LINE_BYTES):
            number += 1
            if value.strip():
                yield number, value.rstrip(b"\n")
