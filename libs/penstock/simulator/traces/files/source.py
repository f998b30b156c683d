"""Detection of a trace file's format, and its lines with the format's column names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, shown, table_rows, text_of
from penstock.simulator.traces.files.batch_systems import (
    SACCT_COMMAND,
    SACCT_NAMES,
    kubernetes_name,
    kubernetes_values,
)
from penstock.simulator.traces.files.fields import Format, span_from
from penstock.simulator.traces.files.formats import FORMATS, NEEDED
from penstock.simulator.traces.files.guessing import near_misses
from penstock.simulator.traces.files.published import (
    COLUMNS,
    PAI,
    PHILLY,
    PHILLY_KEYS,
    PHILLY_NAMES,
    PUBLISHED,
    is_pai,
    is_pai_jobs,
    pai_rows,
    philly_rows,
)

OTHER_DELIMITERS = "|;\t"  # where the header has no comma
LIST_SHAPES = 'JSON without a list of jobs: a list, {"jobs": […]} or an object a line'
BY_COLUMN = 'JSON column by column: write it by line, in pandas as to_json(orient="records")'
STEPS_COLUMN = "total_steps"  # of the formats without a header, a number
SAFE = ":/+,;@()[]~"  # in labels: `formats.py` unquotes the rest
SACCT, KUBERNETES = "sacct", "kubernetes"
DURATION = "duration_s"  # a file may have it as two moments


class Source(NamedTuple):
    """A file whose format is known. `rows` yields its lines; problems of lines that cannot be split go to the
    given list."""

    name: str
    form: Format
    columns: Sequence[str]
    """The format's names of the columns, in the order of the file."""
    rows: Callable[[list[Problem]], Iterator[Row]]
    theirs: Mapping[str, str] = MappingProxyType({})
    """A column of the format → its name in the file, if that differs."""
    unit: str = "line"

    def column(self, ours: str) -> str:
        """The file's name of a column of the format."""
        return self.theirs.get(ours, ours)

    def problem(self, line: int, field: str, text: str) -> Problem:
        """A problem with a field of the job in this line."""
        return Problem(line, self.column(self.form.column(field)), text, self.unit)


def open_source(path: Path, renames: Mapping[str, str] = MappingProxyType({})) -> Source:
    """The source, with its format by the first line or the keys. `renames`: a column of our own CSV → the
    file's; then that is the format.

    Raises `BadFile`; for a file of no format with the renames that are needed.
    """
    text = text_of(path)
    if text.lstrip()[:1] in ("[", "{"):
        return _json_source(path, text, renames)
    first = text.partition("\n")[0]
    if "\t" in first and not renames:
        fields = first.split("\t")
        for name, form in FORMATS.items():
            if form.header or len(form.columns) != len(fields):
                continue
            if not fields[form.columns.index(STEPS_COLUMN)].isidentifier():  # not a header with other columns
                return Source(
                    name, form, form.columns, _lines(text, form.columns, form.delimiter, header=False)
                )
    if is_pai(first):
        return Source(PAI, PUBLISHED[PAI], [*COLUMNS, "status"], lambda problems: pai_rows(text, problems))
    if is_pai_jobs(first):
        message = "PAI's table of jobs has no resources; convert its table of tasks, pai_task_table.csv"
        raise BadFile(str(path), [Problem(1, "", message)])
    delimiter = "," if "," in first else next((mark for mark in OTHER_DELIMITERS if mark in first), ",")
    columns = header_of(path, text, delimiter)
    if len(columns) == 1 and "JobID" in first.split():
        message = f"sacct's output as a table for people is not read: {SACCT_COMMAND}"
        raise BadFile(str(path), [Problem(1, "", message)])
    name, form, named, theirs = _named(path, columns, renames)
    return Source(name, form, named, _lines(text, named, delimiter), theirs)


def _lines(
    text: str, columns: Sequence[str], delimiter: str, *, header: bool = True
) -> Callable[[list[Problem]], Iterator[Row]]:
    return lambda problems: table_rows(text, columns, problems, delimiter=delimiter, header=header)


# ------------------------------------------------------------------------------------------------- names


def _named(
    path: Path, columns: Sequence[str], renames: Mapping[str, str]
) -> tuple[str, Format, Sequence[str], Mapping[str, str]]:
    """The format of a file with these columns, the format's names of them,
    and the file's names if they differ."""
    if renames:
        ends = _difference(renames.get(DURATION, ""), columns)
        some = {ours: theirs for ours, theirs in renames.items() if ours != DURATION or ends is None}
        found, theirs = _renamed(path, columns, some)
        form = FORMATS["csv"]
        if ends is not None:
            end, start = (found[columns.index(name)] for name in ends)
            needed = tuple(name for name in form.columns if name != DURATION)
            fields = {**form.fields, DURATION: (end, span_from(start))}
            form = form._replace(columns=(*needed, end, start), fields=fields)
        if form.lacks(found):
            raise BadFile(str(path), near_misses(found) or [_no_format()])
        return "csv", form, found, theirs
    for name, form in FORMATS.items():
        if form.header and not form.lacks(columns):
            return name, form, columns, {}
    small = [column.lower() for column in columns]
    if "jobid" in small or "jobidraw" in small:
        missing = FORMATS[SACCT].lacks(small)
        if not missing:
            return SACCT, FORMATS[SACCT], small, dict(zip(small, columns, strict=True))
        if "JobID" in columns or "JobIDRaw" in columns:
            lacking = ", ".join(SACCT_NAMES[name] for name in missing)
            raise BadFile(str(path), [Problem(1, "", f"format sacct lacks {lacking}: {SACCT_COMMAND}")])
    raise BadFile(str(path), near_misses(columns) or [_no_format()])


def _difference(text: str, columns: Sequence[str]) -> tuple[str, str] | None:
    """The two columns of `end_time-start_time`; None if one column has that name, or no two match."""
    if text in columns:
        return None
    cuts = ((text[:place], text[place + 1 :]) for place, mark in enumerate(text) if mark == "-")
    return next(((end, start) for end, start in cuts if end in columns and start in columns), None)


def _no_format() -> Problem:
    return Problem(1, "", f"no header of any format; our own needs {', '.join(NEEDED)}")


def _renamed(
    path: Path, columns: Sequence[str], renames: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The columns under our names.
    A column with a name of ours that is assigned to another column is not read."""
    for ours, theirs in renames.items():
        if theirs not in columns:
            known = ", ".join(map(shown, columns))
            message = f"--columns {ours}={theirs}: the file has no column {shown(theirs)}; there are {known}"
            raise BadFile(str(path), [Problem(1, "", message)])
    by_theirs = {theirs: ours for ours, theirs in renames.items()}
    found = [by_theirs.get(name, f"{name} " if name in renames else name) for name in columns]
    return found, {new: old for new, old in zip(found, columns, strict=True) if new != old}


# -------------------------------------------------------------------------------------------------- JSON


def _json_source(path: Path, text: str, renames: Mapping[str, str]) -> Source:
    """Source of JSON objects in a list, under `jobs` or `items`, or one a line. Raises `BadFile`."""
    items, unit = _items(path, text)
    if isinstance(items, tuple):  # a list of Kubernetes
        form = FORMATS[KUBERNETES]
        columns = [*form.columns, *form.optional]
        return Source(
            KUBERNETES, form, columns, lambda problems: _kubernetes_rows(items, problems), unit=unit
        )
    objects = [one for _, one in items if isinstance(one, dict)]
    if objects and objects[0].keys() >= PHILLY_KEYS:
        columns = [*COLUMNS, *PUBLISHED[PHILLY].left_out]
        return Source(
            PHILLY,
            PUBLISHED[PHILLY],
            columns,
            lambda problems: philly_rows(items, problems, unit),
            PHILLY_NAMES,
            unit,
        )
    columns = list(dict.fromkeys(key for one in objects for key in one))
    if {"time", "tres"} <= {*columns}:
        raise BadFile(str(path), [Problem(0, "", f"sacct --json is not read: {SACCT_COMMAND}")])
    if not columns:
        raise BadFile(str(path), [Problem(0, "", "no job in it")])
    name, form, named, theirs = _named(path, columns, renames)
    ours = dict(zip(columns, named, strict=True))

    def rows(problems: list[Problem]) -> Iterator[Row]:
        for number, one in items:
            if isinstance(one, dict):
                values = dict.fromkeys(named, "") | {ours[key]: _text(value) for key, value in one.items()}
                yield Row(number, values, unit)
            else:
                problems.append(Problem(number, "", "not an object", unit))

    return Source(name, form, named, rows, theirs, unit)


Items = list[tuple[int, Any]] | tuple[tuple[int, Any], ...]


def _items(path: Path, text: str) -> tuple[Items, str]:
    """(number from 1, object) of all, as a tuple with kinds for Kubernetes; and the unit of the numbers."""
    try:
        whole = orjson.loads(text.encode("utf-8", "surrogateescape"))
    except orjson.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        try:
            return [
                (number, orjson.loads(line.encode("utf-8", "surrogateescape"))) for number, line in lines
            ], "line"
        except orjson.JSONDecodeError:
            raise BadFile(str(path), [Problem(0, "", f"not JSON: {error}")]) from error
    if isinstance(whole, dict):
        kind = whole.get("kind")
        if kind in ("Job", "Pod"):
            return ((1, whole),), "item"
        found = whole.get("items", whole.get("jobs"))
        if isinstance(found, list) and "kind" in whole:
            of_all = str(kind).removesuffix("List") or "Job"  # items of a JobList have no kind of their own
            return tuple(
                (number, {"kind": of_all, **one} if isinstance(one, dict) else one)
                for number, one in enumerate(found, 1)
            ), "item"
        if isinstance(found, list):
            return list(enumerate(found, 1)), "item"
        if whole and all(isinstance(column, dict) for column in whole.values()):
            raise BadFile(str(path), [Problem(0, "", BY_COLUMN)])
        if "job_id" in whole:
            return [(1, whole)], "line"
        raise BadFile(str(path), [Problem(0, "", LIST_SHAPES)])
    return list(enumerate(whole, 1)), "item"


def _kubernetes_rows(items: Sequence[tuple[int, Any]], problems: list[Problem]) -> Iterator[Row]:
    """A line per Job and per Pod; a Pod whose Job is in the list is marked as such."""
    objects = [one for _, one in items if isinstance(one, dict)]
    listed = {kubernetes_name(one) for one in objects if one.get("kind", "Job") == "Job"}
    for number, one in items:
        kind = one.get("kind", "Job") if isinstance(one, dict) else None
        if kind is None:
            problems.append(Problem(number, "", "not an object", "item"))
        elif kind not in ("Job", "Pod"):
            message = (
                f"kind {shown(str(kind))} is not read; `kubectl get jobs -o json` lists jobs, `get pods` pods"
            )
            problems.append(Problem(number, "", message, "item"))
        else:
            yield Row(number, kubernetes_values(one, listed), "item")


def _text(value: Any) -> str:
    """A value in the form of our CSV."""
    match value:
        case list():
            return "|".join(map(_scalar, value))
        case dict():
            return "|".join(
                f"{quote(name, SAFE)}={quote(_scalar(text), SAFE)}" for name, text in value.items()
            )
    return _scalar(value)


def _scalar(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case int() | float():
            return repr(value)
    return orjson.dumps(value).decode()
