"""`penstock estimator …`: handed on to `python -m penstock.estimator.evaluate`; nothing of it is known here."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import gateway
from penstock.cli.exits import Exit, Stop
from penstock.cli.export import pour
from penstock.cli.local import PASS_ALL

COMMAND = (sys.executable, "-m", "penstock.estimator.evaluate")


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True)
    group.command()(report)
    group.command(context_settings=PASS_ALL, add_help_option=False)(evaluate)
    app.add_typer(
        group,
        name="estimator",
        help="What jobs are expected to need: judge it.",
        rich_help_panel="Simulation",
    )


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
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Say and draw how estimates did against what jobs used: predicted against actual, per tier, over time, who over-asks,
    the worst jobs, and how often intervals of remaining time held."""
    _need_the_estimator("report")
    arguments = [*COMMAND, "report", "-o", output]
    for option, path in (("--report", page), ("--png", png)):
        if path is not None:
            arguments += [option, str(path)]
    if ledger is not None:
        sys.stdout.flush()
        os.execv(sys.executable, [*arguments, "--ledger", str(ledger)])
    client = gateway(ctx)
    last_seq = int(client.get("/v1/status")["seq"])
    raise typer.Exit(pour(client, last_seq, [*arguments, "--events", "-"]))


def evaluate(ctx: typer.Context) -> None:
    """Say how well models predict measured runs that they were not shown. `penstock estimator evaluate --help` lists the options."""
    _need_the_estimator("evaluate")
    sys.stdout.flush()
    os.execv(sys.executable, [*COMMAND, "evaluate", *ctx.args])


def _need_the_estimator(verb: str) -> None:
    """Raises `Stop`."""
    if importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("penstock.estimator") is None:
        raise Stop(
            Exit.PROBLEM,
            f"`penstock estimator {verb}` needs the estimator; pip install 'penstock[estimator]'",
        )
