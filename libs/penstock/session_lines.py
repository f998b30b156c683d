"""Wire format of a session, such as a terminal in a running task: lines of JSON in both directions, over an
HTTP connection that was switched to them (`Upgrade: penstock-lines`).

To the task: `{"stdin": BASE64}`, `{"end": true}` (end of input), `{"size": [ROWS, COLUMNS]}`. From it:
`{"stdout": BASE64}`, `{"stderr": BASE64}`, `{"taken": N}` (bytes of input that the program's pipe or terminal
has), at last `{"exit_code": N}`, `{"ended": true}` or `{"problem": TEXT}`.

At most WINDOW_BYTES of input may be under way, so that whoever passes them on never has to stop reading: only
a connection that is read shows that it has ended.
"""

import json
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from typing import Any

PROTOCOL = "penstock-lines"
UPGRADE = {"Connection": "Upgrade", "Upgrade": PROTOCOL}
MAX_LINE_BYTES = 1 << 17  # a chunk as base64 takes a third of it
CHUNK_BYTES = 1 << 15  # of input or output in a line
WINDOW_BYTES = 4 * CHUNK_BYTES  # of input under way
READ_BYTES = 2 * CHUNK_BYTES  # of one read of a connection: a line with its base64
TAKEN_BYTES = WINDOW_BYTES // 4  # of input, after which the node says that it is taken
MAX_SIDE = 65_535  # rows and columns of a terminal; 0: not known


class BadLine(ValueError):
    """A line of another form."""


class Lines:
    """Bytes as they come, cut into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete with this, without their ends. Raises `BadLine`."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*whole, self._rest))) > MAX_LINE_BYTES:
            raise BadLine(f"a line of a session has more than {MAX_LINE_BYTES} bytes")
        return whole


def line(**fields: Any) -> bytes:
    """`fields`: those above; bytes become base64."""
    return json.dumps(fields, default=lambda data: b64encode(data).decode()).encode() + b"\n"


def input_of(text: bytes) -> bytes | tuple[int, int] | None:
    """What a line to the task says: bytes of input, rows and columns, None:
    the input has ended. Raises `BadLine`."""
    try:
        found = json.loads(text)
        [(name, value)] = found.items()
        if name == "stdin":
            return b64decode(value, validate=True)
        if name == "size":
            return checked_size(*value)
        if name == "end":
            return None
    except (ValueError, TypeError, AttributeError, NotBase64) as error:
        raise BadLine("a line of a session is none of stdin, size, end") from error
    raise BadLine("a line of a session is none of stdin, size, end")


def size_of(text: str) -> tuple[int, int]:
    """Rows and columns as in `24x80`. Raises `BadLine`."""
    try:
        return checked_size(*map(int, text.split("x")))
    except (ValueError, TypeError) as error:
        raise BadLine(f"{text!r} is not a size of a terminal; give one such as 24x80") from error


def checked_size(rows: int, columns: int) -> tuple[int, int]:
    """Raises ValueError."""
    if any(type(side) is not int or not 0 <= side <= MAX_SIDE for side in (rows, columns)):
        raise ValueError
    return rows, columns
