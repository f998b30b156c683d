"""Health check of a container: asks the service at its socket, `PENSTOCK_HEALTH`, with the standard library
alone.

    python -S -E health.py [SOCKET]

Exit status: 0 when the service answers `ready` within TIMEOUT_S; else 1, with a line that says why.
"""

import os
import socket
import sys

TIMEOUT_S = 4.0  # of a loop that is busy; the check itself is given 5 s


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PENSTOCK_HEALTH", "")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as service:
            service.settimeout(TIMEOUT_S)
            service.connect(path)
            if service.recv(16) == b"ready\n":
                return 0
        print("the service ended its answer", file=sys.stderr)
    except OSError as error:
        print(f"not ready: {path or 'PENSTOCK_HEALTH'}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
