"""`penstock export`: hands the cell's events on to the simulator's command of that name, which makes a trace of them."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penstock.cli.client import Gateway
from penstock.cli.common import gateway
from penstock.cli.exits import Exit, Stop
from penstock.cli.output import console, remark


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Simulation")(export)


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
            help="Jobs submitted from then on: a date and time, or 30d, 12h, 45m before the last record.",
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
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The trace; by default stdout.")
    ] = None,
) -> None:
    """Write the jobs that the cell ran as a trace: last month, to be run again under another policy.

    Each job with what it asked for and how long it ran, measured by the ledger's clock. Jobs that never ran are
    left out and counted; those that still run stand there with the time so far.
    """
    if importlib.util.find_spec("penstock.simulator") is None:
        raise Stop(Exit.PROBLEM, "`penstock export` needs the simulator; pip install 'penstock[simulator]'")
    told = {"--from": since, "--until": until, "--nodes": nodes, "-o": output}
    arguments = [sys.executable, "-m", "penstock.simulator", "export"]
    for option, value in told.items():
        if value is not None:
            arguments += [option, str(value)]
    if ledger is not None:
        if cell is not None:
            raise Stop(
                Exit.BAD_SPEC, "--cell is the gateway's, --ledger reads no gateway; leave one of both out"
            )
        sys.stdout.flush()
        os.execv(sys.executable, [*arguments, "--ledger", str(ledger)])
    client = gateway(ctx)
    status = client.get("/v1/status")
    if cell is not None and status["cell"] != cell:
        raise Stop(
            Exit.PROBLEM, f"{client.server} serves cell {status['cell']}, not {cell}; name its gateway"
        )
    if behind := int(status["projector_lag"]):
        remark(f"penstock: the read models are {behind} records behind the ledger; this waits for them")
    raise typer.Exit(pour(client, int(status["seq"]), [*arguments, "--events", "-"]))


def pour(client: Gateway, last_seq: int, command: list[str]) -> int:
    """Feeds the events up to a record to the command; returns its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a command that refuses its options shall be heard
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            for event in _events(client, last_seq):
                process.stdin.write(event.encode() + b"\n")
        except BrokenPipeError:
            pass  # the command has ended, and has said why
        except BaseException:
            process.kill()  # half of the events would make a trace that looks whole
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
        return process.wait()


def _events(client: Gateway, last_seq: int) -> Iterator[str]:
    """All events that are kept, up to this record, as JSON. Raises `Stop` where the stream ends before it."""
    columns = (TextColumn("reading the ledger"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    seen = 0
    with (
        Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar,
        client.lines("/v1/stream", after="0", until=last_seq) as chunks,
    ):
        task = bar.add_task("", total=last_seq)
        rest = ""
        for chunk in chunks:
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    seen = int(value.partition(".")[0])
                elif field == "data":
                    yield value
            bar.update(task, completed=seen)
    if seen < last_seq:
        raise Stop(
            Exit.UNREACHABLE, f"{client.server} ended the stream at record {seen} of {last_seq}; try again"
        )
