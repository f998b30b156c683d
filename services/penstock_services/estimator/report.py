"""`penstock estimator report`: accuracy of estimates, from a ledger or the gateway's events."""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import math
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from penstock.charts import files
from penstock.charts.report import Table
from penstock.exits import BadCommand
from penstock.model.codec import decode_fact
from penstock.model.errors import EventError
from penstock.model.topics import Topic
from penstock.runtime.json_lines import json_lines
from penstock.screen import console, plain_table, write_json
from penstock_services.estimator import report_tables
from penstock_services.estimator.core.accuracy import Accuracy, accuracy_of
from penstock_services.estimator.core.state import HANDLERS, At, State, evolve

BARS = "▁▂▃▄▅▆▇█"
FULL_BAR = math.log(4)  # a median that is off by a factor of four or more fills the bar


class _Event(msgspec.Struct):
    """One event as the gateway streams it; `type` carries no version: the gateway writes current ones."""

    seq: int
    at_ms: int
    type: str
    data: msgspec.Raw


def report(
    ctx: typer.Context,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read a ledger, one record a line, instead of the cell's."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write a page with charts, whole in one file."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts of the page there as PNG files.")
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o")] = "table",
) -> None:
    """Report and draw how estimates did against what jobs used.

    Predicted against actual, per tier, over time, who over-asks, the worst jobs, and how often intervals of remaining
    time held.
    """
    if (page or png) and find_spec("altair") is None:
        option = "--report" if page else "--png"
        raise BadCommand(f"{option} needs altair, which is not installed; pip install 'penstock[charts]'")
    files.check(page, png)
    fold = State(Topic.JOBS, 0)
    runs, session = fold.finished, ctx.find_root().obj
    if ledger is not None:
        _fold_ledger(ledger, fold)
    else:
        _fold_events(session.events(), fold)
    found = accuracy_of(runs)
    if page or png:
        if not found.tiers:
            raise BadCommand(
                "nothing to draw: no job has succeeded yet that has both an estimate and a measurement"
            )
        from penstock_services.estimator.report_charts import page_of  # Altair takes 0.3 s

        files.write(page_of(runs, found, session.line), page, png, console(stderr=True, soft_wrap=True))
    if output == "json":
        write_json(plain(found))
    else:
        show(found)


def _fold_ledger(path: Path, fold: State) -> None:
    try:
        for _, value in json_lines(path):
            fold.fold(value)
    except OSError as error:
        raise BadCommand(f"{path}: {error.strerror or error}") from error
    if not fold.seq:
        raise BadCommand(f"{path}: no ledger: no line is a first record")
    if fold.void:
        text = f"penstock: {path}: {fold.void} records do not follow the one before and are void"
        print(text, file=sys.stderr)


def _fold_events(events: Iterable[bytes], fold: State) -> None:
    decode = msgspec.json.Decoder(_Event).decode
    versions = {name.rpartition(".v")[0]: name for name in HANDLERS}
    for number, value in enumerate(events, start=1):
        try:
            event = decode(value)
            name = versions.get(event.type)
            if name is not None:
                evolve(fold, At(event.seq, event.at_ms), name, decode_fact(name, event.data))
        except (msgspec.DecodeError, EventError) as error:
            raise BadCommand(f"the cell's events: line {number}: no event: {error}") from error


def plain(found: Accuracy) -> Mapping[str, Any]:
    """For JSON, which writes NaN as null."""
    eta = found.remaining
    return {
        "runs": found.runs,
        "set_aside": found.rejected,
        "killed_for_memory": found.killed,
        "tiers": {
            tier: {name: score._asdict() for name, score in fields.items()}
            for tier, fields in found.tiers.items()
        },
        "drift": found.drift,
        "over_asking": [one._asdict() for one in found.over_asking],
        "worst": [
            {
                "job_id": one.run.job_id,
                "owner": one.run.info.owner,
                "tier": one.tier,
                "field": one.field,
                "said": one.estimate,
                "used": one.used,
            }
            for one in found.worst
        ],
        "remaining": None if eta is None else {**eta._asdict(), "held": eta.held._asdict()},
    }


def show(found: Accuracy) -> None:
    """For people: scores per tier, drift, who over-asks, the worst jobs."""
    screen = console()
    for line in report_tables.summary(found):
        screen.print(line, markup=False)

    def show_table(title: str, table: Table | None) -> None:
        if table is None:
            return
        screen.print(f"\n{title}")
        lines = plain_table(*table.columns, right=table.columns[table.texts :])
        for row in table.rows:
            lines.add_row(*(cell.text for cell in row))
        screen.print(lines, markup=False)

    show_table("Estimates against use:", report_tables.scores(found))
    drifting = {name: values for name, values in found.drift.items() if values}
    if drifting:
        screen.print("\nMedian error from the oldest runs to the newest (a full bar: a factor of 4):")
        for name, values in drifting.items():
            screen.print(f"  {bars(values)}  {name}, now {math.exp(values[-1]):.2f}")
    show_table("Who asks for more than is used:", report_tables.owners(found))
    show_table("The estimates that were farthest off:", report_tables.worst(found))


def bars(values: Iterable[float]) -> str:
    """A bar per stretch of runs."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, int(value / FULL_BAR * top + 0.5))] for value in values)
