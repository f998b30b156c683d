"""`penstock report`: HTML page and PNG charts of an existing ledger, simulated or real."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.commandline import takes
from penstock.exits import BadCommand, Exit
from penstock.runtime.files.event_import import read_events, read_ledger
from penstock.screen import console, write_json
from penstock.simulator.assumptions import LABELS
from penstock.simulator.commands.options import Output, bad_input_stops
from penstock.simulator.commands.output import figures_table, print_assumptions, stdout
from penstock.simulator.commands.reporting import ReportOptions
from penstock.simulator.report.build import Background, ledger_report
from penstock.simulator.report.measured import measured
from penstock.simulator.results.figures import figures_of
from penstock.simulator.results.series import series_of
from penstock.simulator.results.timeline import Timeline
from penstock.text.counting import count


@dataclass(frozen=True, kw_only=True)
class LedgerReportOptions(ReportOptions):
    """Options of `penstock report`."""

    ledger: Annotated[
        Path | None,
        typer.Argument(
            help="A ledger that `penstock simulate --ledger` wrote; -: stdin; without it, the cell's own."
        ),
    ] = None
    output: Output = "table"


@takes(LedgerReportOptions)
@bad_input_stops()
def report(ctx: typer.Context, asked: LedgerReportOptions) -> int:
    """Report and plot the history of a cell: where and when jobs ran and waited, what was free.

    Everything is computed from the ledger, so it must be complete from its first record.
    """
    errors, session = console(stderr=True, soft_wrap=True), ctx.find_root().obj
    asked.check_files()
    name = asked.ledger.name if asked.ledger is not None else "the cell"
    timeline = Timeline()
    if asked.ledger is None:
        now_ms = session.now_ms()
        read_events(session.events(), timeline)
        timeline.until(now_ms)
    elif remark := read_ledger(asked.ledger, timeline):
        errors.print(f"penstock: {remark}", markup=False)
    if not timeline.jobs:
        raise BadCommand(f"{name}: it holds no submitted job")
    figures = figures_of(timeline)
    found = measured(timeline, live=asked.ledger is None)
    if asked.output == "json":
        write_json({**figures, "assumptions": found})
    else:
        stdout().print(figures_table(figures))
        print_assumptions(found, stdout())
    if asked.wanted:
        series = series_of(timeline)
        about = Background(
            command=session.line,
            title=name,
            trace=f"{name}: {len(timeline.jobs):,} jobs",
            cluster=f"{count(series.nodes, 'node')}, {count(series.gpus, 'GPU')}",
            job_model="",
            assumptions=[(LABELS[key], text) for key, text in found.items()],
        )
        asked.write_files(ledger_report(about, series, figures, name), errors)
    return Exit.OK
