"""`penstock export`: the jobs that a cell ran, as a trace that can be run again under another policy."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.exits import BadCommand
from penstock.runtime.files.event_import import read_events, read_ledger
from penstock.screen import console
from penstock.simulator.commands.options import bad_input_stops
from penstock.simulator.traces.files.writing import trace_lines, write_lines
from penstock.simulator.traces.history import History, Left, PastJob, mixed, node_rows
from penstock.text.local_time import NotOneMoment, moment_ms

UNITS_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
AGO = re.compile(r"([1-9][0-9]{0,5})([mhdw])")


@bad_input_stops()
def export(
    ctx: typer.Context,
    cell: Annotated[
        str | None, typer.Option(help="Refuse if the gateway serves another cell than this.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read a ledger that `penstock simulate --ledger` wrote instead."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WHEN",
            help="Jobs submitted since then: a date and time of this zone, or a time before now: 30d, 12h, "
            "45m (of a FILE: before its last record).",
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Jobs submitted before then.")] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the cell's nodes, for `penstock simulate --cluster FILE`."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File for the trace; by default stdout."),
    ] = None,
) -> None:
    """Export the jobs that the cell ran as a trace, to simulate them under another policy.

    Each job has its requested resources and its run time by the ledger's clock. Jobs that never ran are
    left out and counted; jobs that still run have their time so far.
    """
    errors = console(stderr=True, soft_wrap=True)
    for name, text in (("--from", since), ("--until", until)):
        _moment_ms(text, 0, name)
    history, remark = _history_of(ctx, cell, ledger)
    if remark:
        errors.print(f"penstock: {remark}", markup=False)
    since_ms = _moment_ms(since, history.last_ms, "--from")
    until_ms = _moment_ms(until, history.last_ms, "--until")
    found, left = history.jobs(since_ms, until_ms)
    if not found:
        raise BadCommand(
            f"no job that ran was submitted in this time; {_left_out(left) or 'none at all was'}"
        )
    try:
        write_lines(output, lines_of(found))
        if nodes is not None:
            write_lines(nodes, node_rows(history.nodes))
            found_mixed = [node.node_id for node in history.nodes.values() if mixed(node)]
            if found_mixed:
                message = (
                    f"{len(found_mixed)} nodes have GPUs of several kinds and stand there with the "
                    f"first: {found_mixed[0]}, …"
                )
                errors.print(f"penstock: {message}", markup=False)
    except OSError as error:
        if error.filename is None and output is None:
            raise
        raise BadCommand(f"{error.filename or output}: {error.strerror}") from error
    message = _left_out(left)
    errors.print(f"penstock: {len(found)} jobs written{f'; {message}' if message else ''}", markup=False)


def _history_of(ctx: typer.Context, cell: str | None, ledger: Path | None) -> tuple[History, str]:
    """Of the gateway's cell, or of a file; and a remark about what could not be read. Raises `BadCommand`."""
    history = History()
    if ledger is None:
        session = ctx.find_root().obj
        now_ms = session.now_ms()
        read_events(session.events(cell), history)
        history.until(now_ms)
        return history, ""
    if cell is not None:
        raise BadCommand("--cell is the gateway's, --ledger reads no gateway; leave one of both out")
    return history, read_ledger(ledger, history)


def lines_of(found: Sequence[PastJob]) -> Iterator[Sequence[str]]:
    """A trace's lines, with each job's outcome as a further column."""
    yield from trace_lines([one.job for one in found], {"outcome": [one.outcome for one in found]})


def _left_out(left: Left) -> str:
    parts = []
    if left.still_running:
        parts.append(f"{left.still_running} of them still run, and stand there with the time so far")
    if left.never_ran:
        parts.append(f"{left.never_ran} never ran and are left out")
    if left.unknown:
        parts.append(f"{left.unknown} were submitted before the first record of the ledger and are left out")
    return "; ".join(parts)


def _moment_ms(text: str | None, last_ms: int, option: str) -> int | None:
    """The time of an option, ms since the epoch. Raises `BadCommand`."""
    if text is None:
        return None
    ago = AGO.fullmatch(text)
    if ago is not None:
        return last_ms - int(ago[1]) * UNITS_MS[ago[2]]
    try:
        return moment_ms(text)
    except NotOneMoment as error:
        raise BadCommand(f"{option} {text}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise BadCommand(f"{option} {text}: neither a date and time nor a span as 30d, 12h, 45m") from error
