"""`penstock-projector [verify|rebuild]`, or `python -m penstock_services.projector`: the projector, or one
admin command."""

import logging

import orjson
import typer

from penstock import commandline
from penstock.exits import Exit
from penstock.runtime.service import main as serve
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.admin import perform
from penstock_services.projector.shell.service import run

app = commandline.new_app(invoke_without_command=True)


@app.callback()
def projector(ctx: typer.Context) -> None:
    """Run the projector until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    if ctx.invoked_subcommand is None:
        serve("projector", run)


@app.command()
def verify() -> int:
    """Compare the read models with a replay; prints one JSON object. Exit code 1 where they differ."""
    return _show("verify")


@app.command()
def rebuild() -> int:
    """Rebuild the read models from the ledger; prints one JSON object."""
    return _show("rebuild")


def _show(name: str) -> int:
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {name} %(levelname)s: %(message)s")
    found = perform(name, Settings.from_env())
    print(orjson.dumps(found).decode())
    return Exit.OK if found["ok"] else Exit.PROBLEM


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-projector")


if __name__ == "__main__":
    main()
