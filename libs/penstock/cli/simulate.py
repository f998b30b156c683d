"""The simulator's commands: this process becomes `python -m penstock.simulator`; the command line knows nothing of it."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import typer

from penstock.cli.exits import Exit, Stop
from penstock.cli.local import PASS_ALL

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "simulate": "Run a trace under a profile, in virtual time, and tell how it did.",
        "compare": "Run a trace under several profiles and seeds; tell means with confidence intervals.",
        "traces": "List the traces that are here, describe one, or convert it to our CSV.",
    }
)
"""Verb → its line in `penstock --help`; the verbs of `penstock.simulator.commands.main` that need no gateway."""


def add_to(app: typer.Typer) -> None:
    for verb, line in VERBS.items():
        app.command(
            verb,
            help=f"{line} `penstock {verb} --help` lists the options.",
            context_settings=PASS_ALL,
            rich_help_panel="Simulation",
            add_help_option=False,
        )(_become(verb))


def _become(verb: str) -> Callable[[typer.Context], None]:
    def command(ctx: typer.Context) -> None:
        if importlib.util.find_spec("penstock.simulator") is None:
            raise Stop(
                Exit.PROBLEM, f"`penstock {verb}` needs the simulator; pip install 'penstock[simulator]'"
            )
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "penstock.simulator", verb, *ctx.args])

    return command
