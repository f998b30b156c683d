"""`penstock report`: HTML page and PNG charts of an existing ledger, simulated or real."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.commandline import takes
from penstock.exits import BadCommand, Exit
from penstock.ledger.record import GENESIS, read_valid
from penstock.model.errors import EventError
from penstock.runtime.csv_import import BadFile, Problem
from penstock.screen import console, write_json
from penstock.simulator.commands import reporting
from penstock.simulator.commands.export import CELL, Streamed, ledger_lines
from penstock.simulator.commands.options import Output, bad_input_stops
from penstock.simulator.commands.output import figures_table, stdout
from penstock.simulator.commands.reporting import ReportOptions
from penstock.simulator.report.build import Background, ledger_report
from penstock.simulator.report.figures import figures_of
from penstock.simulator.report.series import series_of
from penstock.simulator.report.timeline import VERSIONED, Timeline


class Folded(NamedTuple):
    """`void`: records that do not follow the chain (LAW 3). `ledger_hash`: of the last valid one; empty of events."""

    timeline: Timeline
    ledger_hash: str = ""
    void: int = 0


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
    """Report and draw what a cell did: who ran where and when, who waited, what was free.

    Everything comes from the ledger, so it must be there from its first record on.
    """
    errors, session = console(stderr=True, soft_wrap=True), ctx.find_root().obj
    reporting.judge_report(asked)
    name = asked.ledger.name if asked.ledger is not None else "the cell"
    if asked.ledger is not None:
        timeline, ledger_hash, void = read_ledger(asked.ledger)
    else:
        timeline, ledger_hash, void = read_events(session.events())
    if void:
        errors.print(f"penstock: {void} records do not follow the one before, and are void", markup=False)
    if not timeline.jobs:
        raise BadCommand(f"{name}: it holds no submitted job")
    figures = figures_of(timeline, ledger_hash)
    if asked.output == "json":
        write_json(figures)
    else:
        stdout().print(figures_table(figures))
    if asked.wanted:
        series = series_of(timeline)
        about = Background(
            command=session.line,
            title=name,
            trace=f"{name}: {len(timeline.jobs):,} jobs",
            cluster=f"{series.nodes:,} node{'s' if series.nodes != 1 else ''}, {series.gpus:,} GPUs",
            truth="",
        )
        reporting.write_report(asked, ledger_report(about, series, figures, name), errors)
    return Exit.OK


def read_ledger(path: Path) -> Folded:
    """Raises `BadFile`."""
    timeline, head, void = Timeline(), GENESIS, 0
    for line, value in ledger_lines(path):
        found = read_valid(head, value)
        if found is None:
            void += 1
            continue
        head, record = found
        timeline.records += 1
        _fold(timeline, record.now_ms, [(fact.type, fact.data) for fact in record.facts], str(path), line)
    if head.seq == 0:
        raise BadFile(str(path), [Problem(0, "", "no ledger: no line is a first record")])
    return Folded(timeline, head.id, void)


def read_events(events: Iterable[bytes]) -> Folded:
    """Raises `BadFile`."""
    decode = msgspec.json.Decoder(Streamed).decode
    timeline = Timeline()
    for number, value in enumerate(events, start=1):
        try:
            event = decode(value)
        except msgspec.DecodeError as error:
            raise BadFile(CELL, [Problem(number, "", f"no event: {error}")]) from error
        _fold(timeline, event.at_ms, [(VERSIONED.get(event.type, event.type), event.data)], CELL, number)
    return Folded(timeline)


def _fold(
    timeline: Timeline, now_ms: int, found: Sequence[tuple[str, msgspec.Raw]], source: str, line: int
) -> None:
    """Raises `BadFile`."""
    try:
        timeline.fold(now_ms, found)
    except KeyError as error:
        why = f"{error.args[0]} was never introduced: a report needs the ledger from its first record on"
        raise BadFile(source, [Problem(line, "", why)]) from error
    except EventError as error:
        raise BadFile(source, [Problem(line, "", f"a fact that cannot be read: {error}")]) from error
