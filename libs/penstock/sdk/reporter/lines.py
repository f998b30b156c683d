"""Writer of report lines from a training script to its node-reporter, through a FIFO; `phases`, `progress`
and `stages` use it.

Penstock names a FIFO in PENSTOCK_PHASE_FILE. A line in it is a phase's name, or a JSON object with one field,
`steps`, `window`, `loss`, `stages`, `checkpoint` or `exhausted` (`README.md` shows them). A write never
blocks and never fails: without a reader, or when the FIFO is full, the line is lost.
"""

import os
import sys

FIFO = "PENSTOCK_PHASE_FILE"
RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK")
"""Lightning sets no RANK in the processes that it starts, and changes none that it finds."""
LINE_BYTES = 4_096  # with its end; PIPE_BUF on Linux: a write up to this size is atomic


def write_line(text: str) -> bool:
    """Writes a line, given without its end; returns whether it was written. Costs an open, a write and a
    close: about 10 µs."""
    path, line = os.environ.get(FIFO), f"{text}\n".encode()
    if not path or len(line) > LINE_BYTES:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.write(descriptor, line) == len(line)
        finally:
            os.close(descriptor)
    except OSError:
        return False


def leads() -> bool:
    """Whether this process runs under Penstock and reports for its gang: rank 0, or a script without
    ranks. Processes that a script has started itself (`torch.multiprocessing`) have ranks once their
    process group is initialized."""
    if not os.environ.get(FIFO) or any(os.environ.get(name, "") not in ("", "0") for name in RANKS):
        return False
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return True
    return bool(torch.get_rank() == 0)
