"""`penstock-node-reporter --node-id n1 [--virtual-gpus 4] …`, or `python -m penstock_services.node_reporter`:
one node. With `--backend kubernetes --cluster NAME …`: all nodes of a Kubernetes cluster."""

import sys
from collections.abc import Sequence

import typer

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.node import SERVICE
from penstock_services.node_reporter.shell.run import runner

app = commandline.new_app()
BACKEND = "--backend"


@app.command()
@commandline.takes(Options)
def node_reporter(ctx: typer.Context, options: Options) -> None:
    """Run one node until SIGTERM. Exit code 2: a wrong option or setting."""
    serve(SERVICE, runner(options.with_folders(), own_process=True))


def of_cluster(argv: Sequence[str]) -> bool:
    """Whether the arguments ask for the reporter of a Kubernetes cluster, which has options of its own."""
    following = argv[argv.index(BACKEND) + 1 : argv.index(BACKEND) + 2] if BACKEND in argv else ()
    return f"{BACKEND}=kubernetes" in argv or list(following) == ["kubernetes"]


def main() -> None:
    """The console script; never returns."""
    if not of_cluster(sys.argv[1:]):
        commandline.start(app, SERVICE)
    from penstock_services.node_reporter.kubernetes.command import app as of_a_cluster

    commandline.start(of_a_cluster, SERVICE)


if __name__ == "__main__":
    main()
