"""Services that die for good in the laboratory: nothing temporary is left of them (LAW 7)."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.faults.laboratory.judging.ending import RANDOM
from tests.faults.laboratory.options import Options
from tests.faults.laboratory.parallel import rarely_collecting
from tests.faults.laboratory.test_laboratory import sound

SMALL: dict[str, Any] = {"jobs": 8, "nodes": 3, "storm_s": 100.0}
LEFT = (
    Options(2, ("adjust", "crash"), "penstock", **SMALL, lost="contention-guard"),
    Options(7, ("adjust", "crash"), "coda", **SMALL, lost="contention-guard"),
    Options(4, ("propose", "stall", "crash"), "muri-l", **SMALL, lost="batcher,estimator,node-reporter"),
)
"""Of the first two, the guard leaves caps, probes and changed cores; the third has windows and plans."""
AT_LENGTH = range(200)
ADJUSTED_AT_LENGTH = 15
"""In 200 runs, of which half have a guard."""


def left_in(runs: Iterable[Options]) -> int:
    """Adjustments of running tasks that there were when the guard died for good. All runs are sound."""
    with rarely_collecting():
        return sum(sound(options).happened["adjustments left by the dead"] for options in runs)


def test_what_a_service_did_for_a_time_ends_when_it_never_comes_back() -> None:
    """The guard's machine is scrapped while jobs are slowed and probed, the batcher's in the middle of a
    window: a quarter of an hour later each job has its cores and its bandwidth again, and the queue goes
    on."""
    assert left_in(LEFT) >= len(LEFT)


@pytest.mark.slow
def test_what_services_did_for_a_time_ends_in_two_hundred_cells() -> None:
    """Any service and several at once, at any moment, in the middle of all other faults."""
    assert left_in(Options(seed, lost=RANDOM) for seed in AT_LENGTH) >= ADJUSTED_AT_LENGTH
