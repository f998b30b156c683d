"""`penstock estimator report`: accuracy of estimates, from a ledger or the gateway's events."""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.text.installing import installing
from penstock.charts import files
from penstock.charts.report import Table
from penstock.exits import BadCommand
from penstock.model.schema.topics import Topic
from penstock.runtime.files.csv_import import BadFile
from penstock.runtime.files.event_import import read_events, read_ledger
from penstock.screen import console, plain_table, write_json
from penstock_services.estimator import report_tables
from penstock_services.estimator.core.accuracy import Accuracy, accuracy_of
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.fold.streamed import Streamed

BARS = "▁▂▃▄▅▆▇█"
FULL_BAR = math.log(4)  # a median that is off by a factor of four or more fills the bar


def report(
    ctx: typer.Context,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read a ledger, one record a line, instead of the cell's."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write a self-contained page with charts."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the charts of the page to this folder as PNG files."),
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o")] = "table",
) -> None:
    """Report and plot the accuracy of estimates against actual usage.

    Predicted against actual values, per tier and over time; owners that request too much; the worst jobs; and
    the coverage of intervals of remaining time.
    """
    if (page or png) and find_spec("altair") is None:
        option = "--report" if page else "--png"
        raise BadCommand(f"{option} needs altair, which is not installed; {installing('charts')}")
    files.check(page, png)
    state, session = State(Topic.JOBS, 0), ctx.find_root().obj
    errors, runs = console(stderr=True, soft_wrap=True), state.finished
    try:
        if ledger is None:
            read_events(session.events(), Streamed(state))
        elif remark := read_ledger(ledger, state):
            errors.print(f"penstock: {remark}", markup=False)
    except BadFile as error:
        raise BadCommand(str(error)) from error
    found = accuracy_of(runs)
    if page or png:
        if not found.tiers:
            raise BadCommand(
                "nothing to draw: no job has succeeded yet that has both an estimate and a measurement"
            )
        from penstock_services.estimator.report_charts import page_of  # Altair takes 0.3 s

        files.write(page_of(runs, found, session.line), page, png, errors)
    if output == "json":
        write_json(plain(found))
    else:
        show(found)


def plain(found: Accuracy) -> Mapping[str, Any]:
    """For JSON, which encodes NaN as null."""
    eta = found.remaining
    return {
        "runs": found.runs,
        "set_aside": found.rejected,
        "killed_for_memory": found.killed,
        "disturbed": found.disturbed,
        "corrected": found.corrected,
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
    """For the terminal: scores per tier, drift, over-asking owners, the worst jobs."""
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
    show_table("Owners whose jobs request more than they use:", report_tables.owners(found))
    show_table("The estimates that were farthest off:", report_tables.worst(found))


def bars(values: Iterable[float]) -> str:
    """A bar per stretch of runs."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, int(value / FULL_BAR * top + 0.5))] for value in values)
