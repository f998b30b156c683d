"""`python -m tests.papers.estimator DATA …`: how well models predict measured runs that they were not
shown."""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import argparse
import shlex
import signal
import sys


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done, 2 bad command or data."""
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
