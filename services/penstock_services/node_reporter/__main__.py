"""`penstock-node-reporter --node-id n1 [--virtual-gpus 4] …`, or `python -m penstock_services.node_reporter`:
one node."""

import typer

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.node import SERVICE
from penstock_services.node_reporter.shell.run import runner

app = commandline.new_app()


@app.command()
@commandline.takes(Options)
def node_reporter(ctx: typer.Context, options: Options) -> None:
    """Run one node until SIGTERM. Exit code 2: a wrong option or setting."""
    serve(SERVICE, runner(options.with_folders(), own_process=True))


def main() -> None:
    """The console script; never returns."""
    commandline.start(app, SERVICE)


if __name__ == "__main__":
    main()
