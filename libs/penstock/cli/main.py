"""The `penstock` command's entry. Light on purpose: Ctrl-C while the rest is imported must leave no
traceback."""

import io
import os
import signal
import sys


def usable_streams() -> None:
    """A stream that was closed before the start reads nothing and drops what is written; stdout in another
    encoding than UTF-8 shows `?` for a letter that it lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - until the end
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Runs the command line; never returns normally. Exit codes: `penstock.exits`."""
    usable_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `penstock get jobs | head` ends quietly
    # Where click is installed, httpx imports its own command line: 90 modules that no command of ours needs.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    from penstock.cli.app import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
