"""`penstock report`: hands a ledger, or the cell's events, on to the simulator's command of that name, which draws them."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import gateway
from penstock.cli.exits import Exit, Stop
from penstock.cli.export import pour


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Simulation")(report)


def report(
    ctx: typer.Context,
    ledger: Annotated[
        Path | None,
        typer.Argument(help="A ledger that `penstock simulate --ledger` wrote; without it, the cell's own."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write a page with figures and charts, whole in one file.",
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts there as PNG files.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Of the figures: table or json.")] = "table",
) -> None:
    """Tell and draw what a cell did: who ran where and when, who waited, what was free.

    Everything comes from the ledger, so it must be there from its first record on.
    """
    if importlib.util.find_spec("penstock.simulator") is None:
        raise Stop(Exit.PROBLEM, "`penstock report` needs the simulator; pip install 'penstock[simulator]'")
    arguments = [sys.executable, "-m", "penstock.simulator", "report", "-o", output]
    for option, value in (("--report", page), ("--png", png)):
        if value is not None:
            arguments += [option, str(value)]
    if ledger is not None:
        sys.stdout.flush()
        os.execv(sys.executable, [*arguments, str(ledger)])
    client = gateway(ctx)
    raise typer.Exit(pour(client, int(client.get("/v1/status")["seq"]), [*arguments, "--events", "-"]))
