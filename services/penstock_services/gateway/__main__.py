"""`penstock-gateway`, or `python -m penstock_services.gateway`: the gateway as a process of its own."""

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.gateway.shell.service import run_alone

app = commandline.new_app()


@app.command()
def gateway() -> None:
    """Run the gateway until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    serve("gateway", run_alone)


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, "penstock-gateway")


if __name__ == "__main__":
    main()
