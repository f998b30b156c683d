"""Tables of the papers beside what comes out here: printed, as one page, and as JSON.

A module of tables has `tables(quick)`, which computes them; `python -m tests.papers` runs all such modules, `python -m tests.papers.MODULE` one. `--quick`: fewer
seeds and traces, in a minute or two.
"""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as Printed

from penstock.charts.render import html
from penstock.charts.report import Cell, Page, Section, Table
from tests.papers.parallel_runs import begin, workers

COLUMNS = ("", "published", "here", "95 % interval", "reach", "")


class Row(NamedTuple):
    """One figure. `reach`: what it has to be at least, in the direction of `better`; None: only shown."""

    label: str
    here: float
    published: float | None = None
    interval: tuple[float, float] | None = None
    reach: float | None = None
    better: str = "higher"
    """higher or lower."""
    remark: str = ""

    @property
    def reached(self) -> bool | None:
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


Make = Callable[[bool], Iterator[PaperTable]]
"""`quick` → the tables, each as soon as it is computed."""


def main(name: str, *modules: Make, **others: Make) -> None:
    """The command: prints each table when it is there, writes what is asked for, ends with 1 where something is not reached.

    `others`: option → the tables that it makes in place of those of the modules.
    """
    parser = ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and traces")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write one HTML page there")
    for option, make in others.items():
        parser.add_argument(f"--{option}", action="store_true", help=make.__doc__)
    options = parser.parse_args()
    modules = tuple(make for option, make in others.items() if getattr(options, option)) or modules
    found: list[PaperTable] = []
    screen = Console(width=140)
    with workers() as pool:
        for make in modules:
            count = begin(make.__module__, partial(make, options.quick), pool)
            if count:
                print(f"{make.__module__}: {count} simulations on {os.cpu_count()} cores", file=sys.stderr)
            for table in make(options.quick):
                found.append(table)
                screen.print(printed(table))
                if options.json is not None:
                    options.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    if options.page is not None:
        options.page.write_text(html(page(found, f"python -m {name}")), encoding="utf-8")
    short = [f"{table.key}: {row.label}" for table in found for row in table.rows if row.reached is False]
    for one in short:
        print(f"short: {one}", file=sys.stderr)
    sys.exit(1 if short else 0)


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
    sign = "≥" if row.better == "higher" else "≤"
    reach = "" if row.reach is None else f"{sign} {_number(row.reach)} {'✓' if row.reached else '✗'}"
    published = "" if row.published is None else _number(row.published)
    return row.label, published, _number(row.here), interval, reach, row.remark


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.4g}"
