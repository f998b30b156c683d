"""`python -m penstock.simulator simulate …`."""

import signal
import sys

from penstock.simulator.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends quietly
    sys.exit(main(sys.argv[1:]))
