"""A training script tells its phase: `phase("launch")` while it loads, `phase("train")`, `phase("save")`.

Outside of Penstock, and whenever nobody listens, it does nothing. Source of the phases: Liquid §3 eq. 1.
"""

import os
from contextlib import suppress
from typing import Literal


def phase(name: Literal["launch", "train", "save"]) -> None:
    """Says that this phase begins now. Costs one small write; never blocks and never fails."""
    path = os.environ.get("PENSTOCK_PHASE_FILE")
    if path:
        with suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, f"{name}\n".encode())
            finally:
                os.close(descriptor)
