"""`python -m tests.papers.estimator DATA …`: how well models predict measured runs that they were not shown."""

import argparse
import os
import shlex
import signal
import sys


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done, 2 bad command or data."""
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(
            library, "1"
        )  # before numpy: on such small matrices threads wait for each other
    from tests.papers.estimator import evaluation

    parser = argparse.ArgumentParser(prog="python -m tests.papers.estimator", description=evaluation.__doc__)
    evaluation.add_arguments(parser)
    asked = parser.parse_args(arguments)
    asked.line = shlex.join(["python", "-m", "tests.papers.estimator", *arguments])
    return evaluation.run(asked)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends quietly
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
