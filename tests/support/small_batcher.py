"""A batcher process for a profile of small stages: `python -m tests.support.small_batcher [SECONDS]`, as `penstock-batcher` otherwise.

SECONDS: so long does it plan, at least.
"""

import sys
import time
from functools import partial
from typing import Any

from penstock.runtime.service import main as serve
from penstock_services.batcher.core.batcher import Work, solve
from penstock_services.batcher.shell.service import run
from penstock_services.batcher.shell.worker import Worker
from tests.support.small_stages import FirstFitBatch, known_as

PROFILE = "small"


def solve_small(work: Work, seconds: float = 0.0) -> Any:
    """In the worker process, which imports this module and knows the product's own profiles."""
    time.sleep(seconds)  # clock: a slow plan, as long as the test asks for
    with known_as(PROFILE, batch=FirstFitBatch()):
        return solve(work)


if __name__ == "__main__":
    took_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    with known_as(PROFILE, batch=FirstFitBatch()):
        from tests.support import small_batcher  # under its own name, which the worker imports

        serve("batcher", partial(run, worker=Worker(partial(small_batcher.solve_small, seconds=took_s))))
