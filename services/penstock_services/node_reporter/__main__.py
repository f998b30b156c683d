"""`python -m penstock_services.node_reporter --node-id n1 [--virtual-gpus 4] …`: one node, until SIGTERM."""

import os
import sys

from penstock.errors import ConfigurationError
from penstock.runtime.service import EXIT_CONFIGURATION
from penstock.runtime.service import main as serve
from penstock_services.node_reporter.options import parse
from penstock_services.node_reporter.shell.node import SERVICE
from penstock_services.node_reporter.shell.run import runner


def main() -> None:
    """Reads the command line, then runs until SIGTERM. Exit status 2: a wrong option or setting."""
    try:
        options = parse(sys.argv[1:], dict(os.environ))
    except ConfigurationError as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    serve(SERVICE, runner(options))


if __name__ == "__main__":
    main()
