"""`penstock up` and `penstock demo`: this process becomes `python -m penstock.local`, so Ctrl-C reaches it directly."""

import importlib.util
import os
import signal
import sys

import typer

from penstock.cli.exits import Exit, Stop

PASS_ALL = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    panel = "This machine"
    app.command(context_settings=PASS_ALL, rich_help_panel=panel, add_help_option=False)(up)
    app.command(context_settings=PASS_ALL, rich_help_panel=panel, add_help_option=False)(demo)


def up(ctx: typer.Context) -> None:
    """Start everything on this machine, until Ctrl-C. `penstock up --help` lists the options."""
    _become("up", ctx.args)


def demo(ctx: typer.Context) -> None:
    """Watch a dozen real training jobs being placed, run and explained (about a minute)."""
    _become("demo", ctx.args)


def _become(command: str, arguments: list[str]) -> None:
    if importlib.util.find_spec("penstock.local") is None:
        raise Stop(
            Exit.PROBLEM, f"`penstock {command}` needs the local services; pip install 'penstock[local]'"
        )
    sys.stdout.flush()
    # Held back over the start of the interpreter; penstock.local lets them in once it can handle them in order.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    os.execv(sys.executable, [sys.executable, "-m", "penstock.local", command, *arguments])
