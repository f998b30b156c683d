"""The `penstock` command's entry. Light on purpose: Ctrl-C while the rest is imported must leave no traceback."""

import signal


def main() -> None:
    """Runs the command line; never returns normally. Exit codes: `penstock.cli.exits`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from penstock.cli.app import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
