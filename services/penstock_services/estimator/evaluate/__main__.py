"""`python -m penstock_services.estimator.evaluate evaluate …`."""

import os
import signal
import sys


def run() -> int:
    """Returns the exit code."""
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(
            library, "1"
        )  # before numpy: matrices this small make threads wait for each other
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
