"""`penstock-contention-guard`, or `python -m penstock_services.contention_guard`: the contention-guard as a
process of its own."""

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.contention_guard.shell.service import run  # after the line above: it imports numpy

app = commandline.new_app()


@app.command()
def contention_guard() -> None:
    """Run the contention-guard until SIGTERM;
    settings come from the environment (`penstock.runtime.settings`)."""
    serve("contention-guard", run)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-contention-guard")


if __name__ == "__main__":
    main()
