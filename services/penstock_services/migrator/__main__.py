"""`penstock-migrator`, or `python -m penstock_services.migrator`: the migrator as a process of its own."""

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.migrator.shell.service import run  # after the line above: it imports numpy

app = commandline.new_app()


@app.command()
def migrator() -> None:
    """Run the migrator until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    serve("migrator", run)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-migrator")


if __name__ == "__main__":
    main()
