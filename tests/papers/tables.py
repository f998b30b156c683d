"""Tables of the papers beside what comes out here: printed, as one page, and as JSON.

A module of tables has `tables()`, which computes them; `python -m tests.papers` runs all such modules,
`python -m tests.papers.PAPER.MODULE` one.

Exit codes: 0: all rows that have to be reached are, but for those of `known_short`; 1: another one is short,
or one of those is not; 2: the data sets are not there.
"""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as Printed

from penstock.charts.render import html
from penstock.charts.report import Cell, Page, Section, Table
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.files.importing import DATA_VARIABLE, data_root
from tests.papers.known_short import KNOWN
from tests.papers.parallel_runs import begin, spent, unfinished, workers

COLUMNS = ("", "published", "here", "95 % interval", "reach", "")


class Row(NamedTuple):
    """One figure. `reach`: what it has to be at least, in the direction of `better`; `within`: how far from
    the published one it may be, relative; both None: only shown."""

    label: str
    here: float
    published: float | None = None
    interval: tuple[float, float] | None = None
    reach: float | None = None
    better: str = "higher"
    """higher or lower."""
    remark: str = ""
    within: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.within is not None:
            assert self.published is not None, self.label
            return abs(self.here - self.published) <= self.within * abs(self.published)
        if self.reach is None:
            return None
        return self.here >= self.reach if self.better == "higher" else self.here <= self.reach


class PaperTable(NamedTuple):
    """`key`: anchor, and name in the JSON. `unit`: of all figures."""

    key: str
    title: str
    unit: str
    rows: Sequence[Row]
    note: str = ""


Make = Callable[[], Iterator[PaperTable]]
"""→ the tables, each as soon as it is computed."""


def main(name: str, *modules: Make, **others: Make) -> None:
    """The command: prints each table when it is there, writes what is asked for, and ends with an exit code.

    `others`: option → the tables that it makes in place of those of the modules.
    """
    parser = ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write one HTML page there")
    for option, make in others.items():
        parser.add_argument(f"--{option}", action="store_true", help=make.__doc__)
    options = parser.parse_args()
    modules = tuple(make for option, make in others.items() if getattr(options, option)) or modules
    if data_root() is None:
        print(
            f"the data sets are not here; set {DATA_VARIABLE} to the folder that holds muri/, pollux/, "
            "gavel/ and synergy/",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        found = _made(modules, options.json)
    except BadFile as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if options.page is not None:
        options.page.write_text(html(page(found, f"python -m {name}")), encoding="utf-8")
    sys.exit(0 if _as_known(found) else 1)


def _made(modules: Sequence[Make], file: Path | None) -> list[PaperTable]:
    """All tables, printed; written to `file` after each, so that little is lost where a run is ended."""
    began_s, found, screen = monotonic(), list[PaperTable](), Console(width=140)

    def every() -> Iterator[PaperTable]:
        return chain.from_iterable(make() for make in modules)

    def report(text: str) -> None:
        print(f"{(monotonic() - began_s) / 60:5.1f} min: {text}", file=sys.stderr, flush=True)

    with workers() as pool:
        tables, simulations = begin(every, pool)
        report(f"{tables} tables, {simulations} simulations on {os.cpu_count()} cores")
        for table in every():
            found.append(table)
            screen.print(printed(table))
            if file is not None:
                file.write_text(json.dumps(as_json(found), indent=1) + "\n")
            report(f"{table.key}; left: {tables - len(found)} tables, {unfinished()} simulations")
    used_s = sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))
    for function, (count, time_s) in sorted(spent().items()):
        print(f"{function}: {count} simulations, {time_s / 60:.1f} min of processor time", file=sys.stderr)
    report(f"all; {used_s / 60:.1f} min of processor time")
    return found


def _as_known(found: Sequence[PaperTable]) -> bool:
    """Names the rows that are short, and what differs from `known_short`; whether nothing does."""
    short = {f"{table.key}: {row.label}" for table in found for row in table.rows if row.reached is False}
    made = {table.key for table in found}
    known = {one: why for why, rows in KNOWN.items() for one in rows if one.split(": ")[0] in made}
    for one in sorted(short & known.keys()):
        print(f"short: {one}: {known[one]}", file=sys.stderr)
    for one in sorted(short - known.keys()):
        print(f"short, and not in known_short.py: {one}", file=sys.stderr)
    for one in sorted(known.keys() - short):
        print(f"not short any more, take it out of known_short.py: {one}", file=sys.stderr)
    return short == known.keys()


def printed(table: PaperTable) -> Printed:
    shown = Printed(title=f"{table.title} ({table.unit})", caption=table.note or None)
    for column in COLUMNS:
        shown.add_column(column)
    for row in table.rows:
        shown.add_row(*_texts(row))
    return shown


def as_json(tables: Sequence[PaperTable]) -> dict[str, object]:
    return {
        table.key: {
            "title": table.title,
            "unit": table.unit,
            "note": table.note,
            "rows": [{**row._asdict(), "reached": row.reached} for row in table.rows],
        }
        for table in tables
    }


def page(tables: Sequence[PaperTable], command: str) -> Page:
    sections = [
        Section(
            table.key,
            f"{table.title} ({table.unit})",
            table.note,
            table=Table(COLUMNS, [[Cell(text) for text in _texts(row)] for row in table.rows]),
        )
        for table in tables
    ]
    return Page("Published figures, and what comes out here", (), command, sections)


def _texts(row: Row) -> tuple[str, ...]:
    interval = "" if row.interval is None else f"{_number(row.interval[0])} to {_number(row.interval[1])}"
    published = "" if row.published is None else _number(row.published)
    return row.label, published, _number(row.here), interval, _reach(row), row.remark


def _reach(row: Row) -> str:
    if row.reached is None:
        return ""
    mark = "✓" if row.reached else "✗"
    if row.within is not None:
        return f"± {_number(100 * row.within)} % {mark}"
    assert row.reach is not None
    return f"{'≥' if row.better == 'higher' else '≤'} {_number(row.reach)} {mark}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.4g}"
