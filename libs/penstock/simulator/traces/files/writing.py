"""CSV export of traces: `read_trace` reads the same jobs back."""

import csv
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from penstock.simulator.traces.files.formats import NEEDED, OWN
from penstock.simulator.traces.jobs import TraceJob

SAFE = ":/+,;@()[]~"
DEFAULTS = {**TraceJob._field_defaults, "duration_s": 0.0}
"""Values that are written as an empty field."""


def _text(name: str, value: Any) -> str:
    """A value in the form that `formats.py` reads."""
    if name in DEFAULTS and value == DEFAULTS[name]:
        return ""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return repr(value).removesuffix(".0")  # the shortest text that reads as the same number
        case tuple():
            parts = (
                part if isinstance(part, str) else "=".join(quote(text, SAFE) for text in part)
                for part in value
            )
            return "|".join(parts)
    return str(value)


def trace_lines(
    jobs: Sequence[TraceJob], more: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Iterable[Sequence[str]]:
    """The header, then a line per job; columns without any value are left out.

    `more`: further columns, which the reader ignores.
    """
    columns = {name: [_text(name, getattr(job, name)) for job in jobs] for name in OWN}
    written = {name: values for name, values in columns.items() if name in NEEDED or any(values)}
    written.update({name: list(values) for name, values in more.items()})
    yield list(written)
    yield from zip(*written.values(), strict=True)


def write_lines(path: Path | None, lines: Iterable[Sequence[str]]) -> None:
    """Writes a file whole or not at all: into a temporary file beside it, then renamed. None: to stdout.
    Raises OSError."""
    if path is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():  # a pipe or a terminal cannot be replaced by a rename
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        return
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
