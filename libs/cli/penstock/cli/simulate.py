"""`penstock simulate`: this process becomes `python -m penstock.simulator`; the command line knows nothing of it."""

import importlib.util
import os
import sys

import typer

from penstock.cli.exits import Exit, Stop
from penstock.cli.local import PASS_ALL


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=PASS_ALL, rich_help_panel="Simulation", add_help_option=False)(simulate)


def simulate(ctx: typer.Context) -> None:
    """Run a trace under a profile, in virtual time, and tell how it did. `penstock simulate --help` lists the options."""
    if importlib.util.find_spec("penstock.simulator") is None:
        raise Stop(Exit.PROBLEM, "`penstock simulate` needs the simulator; pip install 'penstock[simulator]'")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "penstock.simulator", "simulate", *ctx.args])
