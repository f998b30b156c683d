"""Reading a CSV trace strictly: every problem with its line and column, none dropped in silence."""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypeVar

MAX_SHOWN = 20  # problems told in full; the others are counted
MAX_BYTES = 1 << 30
MAX_FIELD = 256
MAX_NUMBER = 1e12  # 30,000 years in seconds
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
WHOLE = re.compile(r"[0-9]{1,18}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}")


class Problem(NamedTuple):
    """`line` counts from 1, the header included; 0: the whole file. `column`: its name; empty: the whole line."""

    line: int
    column: str
    text: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "file"
        return f"{where}, column {self.column}: {self.text}" if self.column else f"{where}: {self.text}"


class BadTrace(ValueError):
    """The trace cannot be read; `problems` holds all that is wrong with it."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{path}: {problem}" for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"{path}: and {len(problems) - MAX_SHOWN} problems more")
        super().__init__("\n".join(lines))


class Row:
    """One line by column; each reading method notes what is wrong and returns a stand-in."""

    def __init__(self, line: int, values: Mapping[str, str]) -> None:
        self.line = line
        self.problems: list[Problem] = []
        self._values = values

    def number(self, column: str, *, above: float | None = None, most: float = MAX_NUMBER) -> float:
        """A decimal ≥ 0, or > `above`."""
        text = self._values[column].strip()
        if not NUMBER.fullmatch(text):
            return self.bad(column, f"{text[:40]!r} is no number ≥ 0", 0.0)
        value = float(text)
        if value > most:
            return self.bad(column, f"{text[:40]} is out of all range", 0.0)
        if above is not None and value <= above:
            return self.bad(column, f"{text[:40]} must be more than {above:g}", 0.0)
        return value

    def whole(self, column: str, *, least: int = 0) -> int:
        text = self._values[column].strip()
        if not WHOLE.fullmatch(text):
            return self.bad(column, f"{text[:40]!r} is no whole number ≥ {least}", least)
        value = int(text)
        if value < least:
            return self.bad(column, f"{value} is less than {least}", least)
        return value

    def name(self, column: str, *, optional: bool = False) -> str:
        """Letters, digits and . _ : / -, at most 120."""
        text = self._values[column].strip()
        if (optional and not text) or NAME.fullmatch(text):
            return text
        return self.bad(column, f"{text[:40]!r} is no name of letters, digits and . _ : / -", "")

    def moment_s(self, column: str) -> float:
        """A date and time, as seconds since 1970; without an offset it is UTC."""
        text = self._values[column].strip()
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            return self.bad(column, f"{text[:40]!r} is no date and time", 0.0)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()

    T = TypeVar("T")

    def bad(self, column: str, text: str, stand_in: T) -> T:
        self.problems.append(Problem(self.line, column, text))
        return stand_in


def text_of(path: Path) -> str:
    """The file as text. Raises `BadTrace` for what cannot be read at all."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadTrace(str(path), [Problem(0, "", f"larger than {MAX_BYTES} bytes")])
        raw = path.read_bytes()
    except OSError as error:
        raise BadTrace(str(path), [Problem(0, "", error.strerror or str(error))]) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadTrace(
            str(path), [Problem(line, "", f"byte {raw[error.start]:#04x} is not UTF-8")]
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadTrace(str(path), [Problem(line, "", "a NUL character: this is no text file")])
    return text


def header_of(path: Path, text: str) -> list[str]:
    """The column names. Raises `BadTrace` for an empty file or a column that comes twice."""
    first = next(csv.reader(StringIO(text)), None)
    if first is None or not any(name.strip() for name in first):
        raise BadTrace(str(path), [Problem(0, "", "empty: a header line was expected")])
    names = [name.strip() for name in first]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadTrace(str(path), [Problem(1, name, "stands in the header twice") for name in twice])
    return names


Read = TypeVar("Read")


def rows(
    text: str, columns: Sequence[str], read: Callable[[Row], Read], problems: list[Problem]
) -> Iterator[tuple[int, Read]]:
    """(line, what `read` made of it) of each good line; what is wrong with the others goes to `problems`."""
    reader = csv.reader(StringIO(text), strict=True)
    next(reader)
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problems.append(Problem(reader.line_num, "", str(error)))
            continue
        if not values:
            continue
        line = reader.line_num
        if len(values) != len(columns):
            problems.append(Problem(line, "", f"{len(values)} fields, the header has {len(columns)}"))
            continue
        long = [name for name, value in zip(columns, values, strict=True) if len(value) > MAX_FIELD]
        if long:
            problems += [Problem(line, name, f"longer than {MAX_FIELD} characters") for name in long]
            continue
        row = Row(line, dict(zip(columns, values, strict=True)))
        found = read(row)
        if row.problems:
            problems += row.problems
        else:
            yield line, found
