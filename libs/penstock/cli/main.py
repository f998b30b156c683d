"""The `penstock` command's entry. Light on purpose: Ctrl-C while the rest is imported must leave no traceback."""

import signal
import sys


def main() -> None:
    """Runs the command line; never returns normally. Exit codes: `penstock.exits`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `penstock get jobs | head` ends quietly
    from penstock.cli.app import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
