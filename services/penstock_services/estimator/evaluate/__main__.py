"""`python -m penstock_services.estimator.evaluate evaluate …`."""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import signal
import sys


def run() -> int:
    """Returns the exit code."""
    from penstock_services.estimator.evaluate.command import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends quietly
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
