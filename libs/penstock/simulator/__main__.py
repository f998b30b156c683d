"""`python -m penstock.simulator simulate …`."""

import gc
import signal
import sys

from penstock.simulator.commands.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends quietly
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs start with it ignored
    gc.freeze()  # what was imported stays
    gc.set_threshold(50_000, 20, 20)  # as in a service
    sys.exit(main(sys.argv[1:]))
