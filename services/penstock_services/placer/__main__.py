"""`penstock-placer [replay]`, or `python -m penstock_services.placer`: the placer as a process of its own, or its replay."""

import sys
from typing import Annotated

import orjson
import typer

from penstock import commandline
from penstock.exits import Exit, Stop
from penstock.runtime.service import main as serve
from penstock.runtime.settings import Settings
from penstock_services.placer.shell import replay as replaying
from penstock_services.placer.shell.service import run

app = commandline.new_app(invoke_without_command=True)


@app.callback()
def placer(ctx: typer.Context) -> None:
    """Run the placer until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    if ctx.invoked_subcommand is None:
        serve("placer", run)


@app.command()
def replay(
    until: Annotated[
        int | None, typer.Option(metavar="SEQ", help="Up to this ledger record; default: the last one.")
    ] = None,
    decision: Annotated[
        str | None,
        typer.Option(metavar="ID", help="A ledger seq or a job: show its record as decided again."),
    ] = None,
) -> int:
    """Decide everything again from the log and compare; prints one JSON object.

    Exit codes: 0 everything is identical; 1 something differs; 2 a wrong setting.
    """
    try:
        found = replaying.replay(Settings.from_env(), until, decision, _show_progress)
    except LookupError as error:
        raise Stop(Exit.PROBLEM, str(error)) from error
    print(orjson.dumps(found).decode())
    return Exit.OK if found["ok"] else Exit.PROBLEM


def _show_progress(records: int) -> None:
    print(f"{records} records", file=sys.stderr, flush=True)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-placer")


if __name__ == "__main__":
    main()
