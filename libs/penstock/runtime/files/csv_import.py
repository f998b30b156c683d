"""Strict CSV import of foreign files: every problem is reported with its line and column."""

import codecs
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.runtime.files.times import NUMBER, clock_of, moment_of

MAX_SHOWN = 20  # problems listed in a message; the others are counted
MAX_BYTES = 1 << 30
PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
"""First bytes of archives, as which traces are published → the kind."""
MAX_LINE = 1 << 18  # labels of a job may take most of it
MAX_NUMBER = 1e12  # 30,000 years in seconds
WHOLE = re.compile(r"([0-9]{1,18})(?:\.0{1,9})?")  # 128.0, too: pandas writes so in a column with gaps
MAX_NAME = 128
TIMES = "seconds, an epoch in s or ms, 2026-01-31T12:00:00, 1-02:03:04 or 02:03:04"
SPANS = "seconds, 02:03:04 or 1-02:03:04"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


class Problem(NamedTuple):
    """A problem in a file. `line` counts from 1, the header included; 0: the whole file. `column`: name;
    empty: the whole line."""

    line: int
    column: str
    text: str
    unit: str = "line"
    """The unit of `line`: lines, or the items of a list."""

    def __str__(self) -> str:
        where = f"{self.unit} {self.line}" if self.line else "file"
        return f"{where}, column {self.column}: {self.text}" if self.column else f"{where}: {self.text}"


class BadFile(ValueError):
    """The file cannot be read; `problems` lists all its problems."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{path}: {problem}" for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"{path}: and {len(problems) - MAX_SHOWN} problems more")
        super().__init__("\n".join(lines))


class Row:
    """Parser of one line by column; each method notes a problem and returns a stand-in for a bad value."""

    def __init__(self, line: int, values: Mapping[str, str], unit: str = "line") -> None:
        self.line = line
        self.problems: list[Problem] = []
        self.dated: bool | None = None
        """Whether this line's times count from 1970; None: it has none."""
        self._values = values
        self._unit = unit

    def number(self, column: str, *, above: float | None = None, most: float = MAX_NUMBER) -> float:
        """A decimal ≥ 0, or > `above`."""
        text = self._values[column].strip()
        if not NUMBER.fullmatch(text):
            return self.bad(column, f"{text[:40]!r} is not a number ≥ 0", 0.0)
        value = float(text)
        if value > most:
            return self.bad(column, f"{text[:40]} is out of all range", 0.0)
        if above is not None and value <= above:
            return self.bad(column, f"{text[:40]} must be more than {above:g}", 0.0)
        return value

    def whole(self, column: str, *, least: int = 0, most: int | None = None) -> int:
        text = self._values[column].strip()
        match = WHOLE.fullmatch(text)
        if match is None:
            return self.bad(column, f"{text[:40]!r} is not a whole number ≥ {least}", least)
        value = int(match[1])
        if value < least:
            return self.bad(column, f"{value} is less than {least}", least)
        if most is not None and value > most:
            return self.bad(column, f"{value} is more than {most}", least)
        return value

    def text(self, column: str) -> str:
        """The value without spaces around it; empty where the file has no such column."""
        return self._values.get(column, "").strip()

    def name(self, column: str, *, optional: bool = False, most: int = MAX_NAME) -> str:
        """A name of letters, digits and . _ : / -, at most `most` characters."""
        text = self._values[column].strip()
        return text if optional and not text else self.checked_name(column, text, most)

    def checked_name(self, column: str, text: str, most: int = MAX_NAME) -> str:
        if len(text) > most:
            return self.bad(column, f"{text[:40]!r} …: {len(text)} characters, at most {most}", "")
        if NAME.fullmatch(text):
            return text
        return self.bad(column, f"{text[:40]!r} is not a name of letters, digits and . _ : / -", "")

    def knows(self, column: str) -> bool:
        """Whether the file has the column."""
        return column in self._values

    def has(self, column: str) -> bool:
        """Whether this line has a value in this column."""
        return bool(self.text(column))

    def moment_s(self, column: str, per: float = 1.0) -> float:
        """A time of any usual form, `dated` or from the start of the file; `per`: units of a plain number in
        a second."""
        text = self._values[column].strip()
        found = moment_of(text, per)
        if found is None:
            far = NUMBER.fullmatch(text) is not None
            message = f"{text[:40]} is out of all range" if far else f"{shown(text)!r} is no time: {TIMES}"
            return self.bad(column, message, 0.0)
        if self.dated not in (None, found.dated):
            return self.bad(
                column, f"{shown(text)} is not a time of the same kind as the others of this line", 0.0
            )
        self.dated = found.dated
        return found.at_s

    def span_s(self, column: str, *, above: float | None = None, per: float = 1.0) -> float:
        """A length of time, ≥ 0 or > `above`; `per`: units of a plain number in a second."""
        text = self._values[column].strip()
        clock_s = clock_of(text)
        if clock_s is None:
            if not NUMBER.fullmatch(text):
                return self.bad(column, f"{shown(text)!r} is not a length of time: {SPANS}", 0.0)
            return self.number(column, above=above) / per
        if above is not None and clock_s <= above:
            return self.bad(column, f"{text} must be more than {above:g}", 0.0)
        return clock_s

    T = TypeVar("T")

    def bad(self, column: str, text: str, stand_in: T) -> T:
        self.problems.append(Problem(self.line, column, text, self._unit))
        return stand_in


def text_of(path: Path) -> str:
    """The file as text, lines ended by `\\n`. Raises `BadFile` for an unreadable file.

    Bytes that are not UTF-8 stay in it as lone surrogates, so that `rows` can report each line that has any.
    """
    try:
        if not path.is_file():
            path.stat()
            kind = "a folder" if path.is_dir() else "no regular file"
            raise BadFile(str(path), [Problem(0, "", f"{kind}; name a file")])
        if path.stat().st_size > MAX_BYTES:
            raise BadFile(str(path), [Problem(0, "", f"larger than {MAX_BYTES} bytes")])
        raw = path.read_bytes()
    except OSError as error:
        raise BadFile(str(path), [Problem(0, "", error.strerror or str(error))]) from error
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadFile(str(path), [Problem(0, "", "UTF-16; save it as UTF-8")])
    if (packed := next((kind for begin, kind in PACKED.items() if raw.startswith(begin)), None)) is not None:
        raise BadFile(str(path), [Problem(0, "", f"packed ({packed}); unpack it, and give the table in it")])
    text = raw.decode("utf-8-sig", "surrogateescape")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def header_of(path: Path, text: str, delimiter: str = ",") -> list[str]:
    """The column names. Raises `BadFile` for an empty file, or a first line that is not a header."""
    first = text.partition("\n")[0]
    if not text.strip():
        raise BadFile(str(path), [Problem(0, "", "empty: a header line was expected")])
    if (fault := _unreadable(first)) is not None:
        raise BadFile(str(path), [Problem(1, "", f"{fault}: no table in UTF-8")])
    values = _fields(first, delimiter)
    if isinstance(values, str):
        raise BadFile(str(path), [Problem(1, "", values)])
    names = [name.strip() for name in values]
    if not any(names):
        raise BadFile(str(path), [Problem(0, "", "empty: a header line was expected")])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadFile(str(path), [Problem(1, shown(name), "stands in the header twice") for name in twice])
    return names


Read = TypeVar("Read")


def rows(
    text: str,
    columns: Sequence[str],
    read: Callable[[Row], Read],
    problems: list[Problem],
    *,
    delimiter: str = ",",
    header: bool = True,
) -> Iterator[tuple[int, Read]]:
    """(line, result of `read`) of each good line; the problems of the others go to `problems`."""
    for row in table_rows(text, columns, problems, delimiter=delimiter, header=header):
        found = read(row)
        if row.problems:
            problems += row.problems
        else:
            yield row.line, found


def table_rows(
    text: str, columns: Sequence[str], problems: list[Problem], *, delimiter: str = ",", header: bool = True
) -> Iterator[Row]:
    """Each line that has as many fields as columns, in readable text; the others go to `problems`.

    Each line is read by itself: a quote that is not closed spoils no other line. Blank lines are skipped.
    """
    for line, whole in enumerate(text.split("\n"), 1):
        if (header and line == 1) or not whole.strip():
            continue
        values = _fields(whole, delimiter) if len(whole) <= MAX_LINE else f"longer than {MAX_LINE} characters"
        if isinstance(values, str):
            problems.append(Problem(line, "", values))
            continue
        if len(values) != len(columns):
            count = f"{len(values)} fields, the header has {len(columns)}"
            problems.append(Problem(line, "", _unreadable(whole) or count))
            continue
        spoilt = [
            Problem(line, shown(name), fault)
            for name, value in zip(columns, values, strict=True)
            if (fault := _unreadable(value))
        ]
        if spoilt:
            problems += spoilt
            continue
        yield Row(line, dict(zip(columns, values, strict=True)))


def _fields(line: str, delimiter: str) -> list[str] | str:
    """The fields of one line, or its problem."""
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as error:
        fault = str(error)
        return "a quote is not closed" if fault == "unexpected end of data" else f"bad quotes: {fault}"


def _unreadable(text: str) -> str | None:
    """The first character that is not valid text; None: all are valid."""
    if text.isascii() and "\0" not in text:
        return None
    for character in text:
        if character == "\0":
            return "a NUL character"
        if "\udc80" <= character <= "\udcff":
            return f"byte {ord(character) - 0xDC00:#04x} is not UTF-8"
    return None


def shown(text: str) -> str:
    """Foreign text made short and printable, for a message."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:40]
    )
