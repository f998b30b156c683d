"""A batcher process for a profile of small stages: `python -m tests.support.batching.small_batcher [GATE]`,
as `penstock-batcher` otherwise.

GATE: a file; each plan waits for it, and makes another one, `GATE.asked`, before.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from penstock.runtime.service import main as serve
from penstock_services.batcher.core.batcher import Work, solve
from penstock_services.batcher.shell import worker
from penstock_services.batcher.shell.service import run
from tests.support.batching.small_stages import FirstFitBatch, known_as
from tests.support.waiting import wait_until

PROFILE = "small"
NEVER_S = 86_400.0


def solve_small(work: Work, gate: str = "") -> Any:
    """In the worker process, which imports this module and knows the product's own profiles."""
    if gate:
        Path(f"{gate}.asked").touch()
        wait_until(Path(gate).exists, gate)
    with known_as(PROFILE, batch=FirstFitBatch()):
        return solve(work)


def begin_unhurried(gate: str) -> worker.Worker:
    """One that gives no plan up on a busy machine, nor yields to its other processes."""
    worker.NICENESS, worker.MAX_SOLVE_S = 0, NEVER_S
    from tests.support.batching import small_batcher  # under its own name, which the worker imports

    return worker.Worker(partial(small_batcher.solve_small, gate=gate))


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    with known_as(PROFILE, batch=FirstFitBatch()):
        serve("batcher", partial(run, worker=begin_unhurried(given)))
