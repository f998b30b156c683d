"""`python -m penstock.node_reporter --node-id n1 [--virtual-gpus 4] …`: one node, until SIGTERM."""

import os
import sys

from penstock.kernel.errors import ConfigurationError
from penstock.kernel.service import EXIT_CONFIGURATION, main
from penstock.node_reporter.options import parse
from penstock.node_reporter.shell.node import SERVICE
from penstock.node_reporter.shell.run import runner

if __name__ == "__main__":
    try:
        options = parse(sys.argv[1:], dict(os.environ))
    except ConfigurationError as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    main(SERVICE, runner(options))
