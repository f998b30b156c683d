"""`penstock-estimator`, or `python -m penstock_services.estimator`: the estimator as a process of its own."""

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.estimator.shell.service import run  # after the line above: it imports numpy

app = commandline.new_app()


@app.command()
def estimator() -> None:
    """Run the estimator until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    serve("estimator", run)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-estimator")


if __name__ == "__main__":
    main()
