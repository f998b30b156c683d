"""`penstock report`: HTML page and PNG charts of an existing ledger, simulated or real."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from penstock.ledger.record import GENESIS, read_valid
from penstock.model.errors import EventError
from penstock.runtime.reading import BadFile, Problem
from penstock.simulator.commands import reporting
from penstock.simulator.commands.exits import OK, BadCommand
from penstock.simulator.commands.export import Streamed, ledger_lines
from penstock.simulator.commands.output import figures_table, stdout, write_json
from penstock.simulator.report.build import Background, ledger_report
from penstock.simulator.report.figures import figures_of
from penstock.simulator.report.series import series_of
from penstock.simulator.report.timeline import VERSIONED, Timeline


class Folded(NamedTuple):
    """`void`: records that do not follow the chain (LAW 3). `ledger_hash`: of the last valid one; empty of events."""

    timeline: Timeline
    ledger_hash: str = ""
    void: int = 0


def add_arguments(to: argparse.ArgumentParser) -> None:
    source = to.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "ledger",
        nargs="?",
        type=Path,
        help="one record a line, as `penstock simulate --ledger` writes; -: stdin",
    )
    source.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="events as the gateway streams them, one JSON a line; -: stdin",
    )
    reporting.add_report_options(to)
    to.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(asked: argparse.Namespace, errors: Console) -> int:
    """Raises `BadCommand`, `BadFile`."""
    reporting.judge_report(asked)
    name = asked.ledger.name if asked.ledger is not None else "the cell"
    timeline, ledger_hash, void = read_ledger(asked.ledger) if asked.ledger else read_events(asked.events)
    if void:
        errors.print(f"penstock: {void} records do not follow the one before, and are void", markup=False)
    if not timeline.jobs:
        raise BadCommand(f"{name}: nobody has submitted a job")
    figures = figures_of(timeline, ledger_hash)
    if asked.output == "json":
        write_json(figures)
    else:
        stdout().print(figures_table(figures))
    if reporting.wanted(asked):
        series = series_of(timeline)
        about = Background(
            command=asked.line,
            title=name,
            trace=f"{name}: {len(timeline.jobs):,} jobs",
            cluster=f"{series.nodes:,} node{'s' if series.nodes != 1 else ''}, {series.gpus:,} GPUs",
            truth="",
        )
        reporting.write_report(asked, ledger_report(about, series, figures, name), errors)
    return OK


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
        _fold(timeline, record.now_ms, [(fact.type, fact.data) for fact in record.facts], path, line)
    if head.seq == 0:
        raise BadFile(str(path), [Problem(0, "", "no ledger: no line is a first record")])
    return Folded(timeline, head.id, void)


def read_events(path: Path) -> Folded:
    """Raises `BadFile`."""
    decode = msgspec.json.Decoder(Streamed).decode
    timeline = Timeline()
    for line, value in ledger_lines(path):
        try:
            event = decode(value)
        except msgspec.DecodeError as error:
            raise BadFile(str(path), [Problem(line, "", f"no event: {error}")]) from error
        _fold(timeline, event.at_ms, [(VERSIONED.get(event.type, event.type), event.data)], path, line)
    return Folded(timeline)


def _fold(
    timeline: Timeline, now_ms: int, found: Sequence[tuple[str, msgspec.Raw]], path: Path, line: int
) -> None:
    """Raises `BadFile`."""
    try:
        timeline.fold(now_ms, found)
    except KeyError as error:
        why = f"{error.args[0]} was never introduced: a report needs the ledger from its first record on"
        raise BadFile(str(path), [Problem(line, "", why)]) from error
    except EventError as error:
        raise BadFile(str(path), [Problem(line, "", f"a fact that cannot be read: {error}")]) from error
