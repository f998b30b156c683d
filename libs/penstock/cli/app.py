"""The command tree, and the one place where errors become a line and an exit code."""

import signal
import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from penstock.cli import admin, estimator, eta, export, inspect, live, local, report, simulate, submit
from penstock.cli.common import Context
from penstock.cli.exits import Exit, Stop, epilog
from penstock.cli.output import remark

GLOBAL_FLAGS = ("--server", "--token-file")

app = typer.Typer(
    name="penstock",
    help="Leads deep-learning jobs to GPUs: submit a job without saying where; see where it runs and why.",
    epilog=epilog(),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _globals(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(envvar="PENSTOCK_SERVER", help="The gateway, by default http://127.0.0.1:8742."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="PENSTOCK_TOKEN_FILE", help="File with the gateway's token, if it wants one."),
    ] = None,
) -> None:
    ctx.obj = Context(server, token_file)


@app.command(rich_help_panel="This machine")
def version() -> None:
    """Print the version."""
    print(f"penstock {distribution_version('penstock')}")


for part in (local, simulate, report, estimator, export, submit, inspect, eta, live, admin):
    part.add_to(app)


def hoist(arguments: list[str]) -> list[str]:
    """Global flags may stand anywhere before `--`; typer wants them first."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first: list[str] = []
    rest: list[str] = []
    position = 0
    while position < end:
        word = arguments[position]
        if word in GLOBAL_FLAGS and position + 1 < end:
            first += [word, arguments[position + 1]]
            position += 2
            continue
        (first if word.startswith(tuple(f"{flag}=" for flag in GLOBAL_FLAGS)) else rest).append(word)
        position += 1
    return [*first, *rest, *arguments[end:]]


def run() -> None:
    """Runs the command line; exits with the code of `exits.py`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `penstock get jobs | head` ends quietly
    try:
        code: Any = app(hoist(sys.argv[1:]), prog_name="penstock", standalone_mode=False)
    except Stop as stop:
        for line in str(stop).splitlines():
            remark(f"penstock: {line}")
        sys.exit(stop.code)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "penstock"
        told = error.format_message().rstrip(".")
        if told:
            remark(f"penstock: {told}; see `{where} --help`")
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(Exit.DETACHED)
    sys.exit(code if isinstance(code, int) else Exit.OK)
