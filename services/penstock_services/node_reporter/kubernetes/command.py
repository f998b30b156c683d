"""`penstock-node-reporter --backend kubernetes --cluster NAME …`: all nodes of a Kubernetes cluster."""

import typer

from penstock import commandline
from penstock.runtime.service import main as serve
from penstock_services.node_reporter.kubernetes.options import ClusterOptions
from penstock_services.node_reporter.kubernetes.shell.session import SERVICE, runner

app = commandline.new_app()


@app.command()
@commandline.takes(ClusterOptions)
def node_reporter(ctx: typer.Context, options: ClusterOptions) -> None:
    """Run the nodes of a Kubernetes cluster until SIGTERM. Exit code 2: a wrong option or setting."""
    serve(SERVICE, runner(options))
