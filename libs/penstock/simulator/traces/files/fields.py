"""Parsers of a trace's fields, and the definition of a format: its columns,
and the parser of each field of a job."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.runtime.files.csv_import import Row, shown
from penstock.simulator.traces.jobs import Stages, TraceJob

MAX_GANG_GPUS = 4_096  # 256 workers of 16 GPUs: the largest possible gang
MAX_WORKERS = 256
MAX_CORES = 262_144  # of a whole gang: 256 workers of 1,024
MAX_MEMORY_MIB = 1 << 30
MAX_GPU_MODELS = 16
MAX_BATCH = 1 << 30
MAX_PATIENCE_S = 1e9
MAX_LABELS, MAX_LABELS_CHARS = 64, 16_384  # bounds of a job spec
MODEL_AND_BATCH = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]*)(?: \(batch size ([1-9][0-9]{0,8})\))?")

Parse = Callable[[Row, str], Any]
"""(line, column) → value of a field; problems are noted in the row."""
Field = tuple[str, Parse]
"""The source column of a field, and its parser."""


class Format(NamedTuple):
    """A file format."""

    columns: tuple[str, ...]
    """Required columns; without a header: the fields of each line, in order."""
    fields: Mapping[str, Field]
    """Field of `TraceJob` → column and parser."""
    optional: tuple[str, ...] = ()
    """Columns that may be missing or empty; their fields then have the default of a `TraceJob`."""
    check: Callable[[Row, TraceJob], TraceJob] = lambda row, job: job
    """Checks that concern several columns."""
    header: bool = True
    delimiter: str = ","
    endless: bool = False
    """Whether its jobs fill a cluster and never end."""
    left_out: tuple[str, ...] = ()
    """Columns of those above that have no field in a `TraceJob`."""
    passes: Callable[[Row], str] = lambda row: ""
    """Kind of a line that is not a job of a trace, such as `job steps`; empty: it is a job."""

    instead: Mapping[str, Sequence[tuple[str, ...]]] = MappingProxyType({})
    """Alternatives to a required column."""

    def lacks(self, known: Collection[str]) -> list[str]:
        """The required columns that a file with these columns lacks."""
        return [
            column
            for column in self.columns
            if column not in known
            and not any(all(one in known for one in ways) for ways in self.instead.get(column, ()))
        ]

    def read(self, row: Row) -> TraceJob:
        """The job of one line; problems are noted in the row."""
        values = {
            field: parse(row, column)
            for field, (column, parse) in self.fields.items()
            if column not in self.optional or row.has(column)
        }
        return self.check(row, TraceJob(**({"submit_s": 0.0, "duration_s": 0.0} | values)))

    def column(self, field: str) -> str:
        """The column of a job's field, for problems found later."""
        return self.fields[field][0] if field in self.fields else field


# ---------------------------------------------------------------------------------------------- parsers


def whole(most: int | None = None, least: int = 1) -> Parse:
    return lambda row, column: row.whole(column, least=least, most=most)


def number(above: float | None = None, most: float = 1e12, per: float = 1.0) -> Parse:
    """A number in a unit of which `per` make one of the field's; bounds are in the column's unit."""
    return lambda row, column: row.number(column, above=above, most=most) / per


def name(row: Row, column: str) -> str:
    return row.name(column)


def job_id(row: Row, column: str) -> str:
    return row.name(column, most=MAX_JOB_ID_CHARS)


def numbered(prefix: str) -> Parse:
    """The line's number, after a prefix, as the job's id."""
    return lambda row, column: f"{prefix}-{row.line - 1}"


def moment(per: float = 1.0) -> Parse:
    """A time of any usual form; a plain number has `per` units in a second."""
    return lambda row, column: row.moment_s(column, per)


def span(per: float = 1.0) -> Parse:
    """A duration > 0, in the same forms."""
    return lambda row, column: row.span_s(column, above=0, per=per)


def span_from(start: str) -> Parse:
    """The time from the moment in column `start` to that in the field's own column, > 0."""

    def parse(row: Row, column: str) -> float:
        passed_s = row.moment_s(column) - row.moment_s(start)
        if row.problems or passed_s > 0:
            return passed_s
        return row.bad(column, f"{shown(row.text(column))} lies not after {start}", 0.0)

    return parse


def unknown_time(row: Row, column: str) -> float:
    """A run time that follows from measured step times: job models `placement-table` and `colocation`."""
    return 0.0


def gpus(row: Row, column: str) -> int:
    gpus = row.whole(column, least=1)
    return gpus if gpus <= MAX_GANG_GPUS else row.bad(column, f"{gpus} exceed {MAX_GANG_GPUS} GPUs", 1)


def gpus_or_none(row: Row, column: str) -> int:
    """GPUs; 0 is allowed for a job that has cores."""
    return row.whole(column, least=0) if row.has("cores") else gpus(row, column)


def gpu_models(row: Row, column: str) -> tuple[str, ...]:
    """Names separated by `|`; none: any model."""
    names = tuple(name.strip() for name in row.text(column).split("|"))
    if len(names) > MAX_GPU_MODELS:
        return row.bad(column, f"{len(names)} models; at most {MAX_GPU_MODELS}", ())
    return tuple(name for name in names if row.checked_name(column, name))


def stages(row: Row, column: str) -> Stages:
    parts = (row.number(f"resource_time_{part}") for part in range(3))
    return Stages(row.number(column, above=0), *parts)


def model(row: Row, column: str) -> str:
    text = row.text(column)
    found = MODEL_AND_BATCH.fullmatch(text)
    return found[1] if found else row.bad(column, f"{text[:40]!r} is no `<model> (batch size <n>)`", "")


def batch(row: Row, column: str) -> int | None:
    found = MODEL_AND_BATCH.fullmatch(row.text(column))
    return int(found[2]) if found is not None and found[2] else None


def yes_or_no(row: Row, column: str) -> bool:
    text = row.text(column).lower()
    if text not in ("yes", "no"):
        return row.bad(column, f"{text[:40]!r} is neither yes nor no", False)
    return text == "yes"


def labels(row: Row, column: str) -> tuple[tuple[str, str], ...]:
    """`name=value|name=value`; special characters are escaped as in URLs: %7C for |."""
    pairs = [part.partition("=") for part in row.text(column).split("|")]
    if any(not name or not equals for name, equals, _ in pairs):
        return row.bad(column, f"{row.text(column)[:40]!r} is no name=value|name=value", ())
    labels = {unquote(name): unquote(value) for name, _, value in pairs}
    if len(labels) < len(pairs):
        return row.bad(column, "a name comes twice", ())
    length = sum(len(name) + len(value) for name, value in labels.items())
    if len(labels) > MAX_LABELS or length > MAX_LABELS_CHARS:
        message = f"{len(labels)} labels, {length} characters; at most {MAX_LABELS} and {MAX_LABELS_CHARS}"
        return row.bad(column, message, ())
    return tuple(labels.items())
