"""`python -m tests.faults.laboratory --seed N`."""

import signal
import sys

from tests.faults.laboratory.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends quietly
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs start with it ignored
    sys.exit(main(sys.argv[1:]))
