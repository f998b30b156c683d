"""`penstock-batcher`, or `python -m penstock_services.batcher`: the batcher as a process of its own."""

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.batcher.shell.service import run  # after the line above: it imports numpy

app = commandline.new_app()


@app.command()
def batcher() -> None:
    """Run the batcher until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    serve("batcher", run)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-batcher")


if __name__ == "__main__":
    main()
