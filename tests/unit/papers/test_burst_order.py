"""Stories of which jobs of a burst start first."""

import msgspec
import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock_papers.baselines.burst_order import CriticalThenShortest
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def order_of(*run_s: int | None) -> list[str]:
    """One node of four GPUs, of which a job has one that has no run time; a window is open, so the others, of
    one worker each, wait."""
    cell = CellDriver(PlacerSettings(profile="liquid", batch_window_ms=60_000, batch_arrivals=2))
    cell.join(node_spec("n1"))
    cell.submit("first", job_spec(workers=1), estimate(1))
    for number, time_s in enumerate(run_s):
        need = msgspec.structs.replace(estimate(1), run_ms=None if time_s is None else time_s * 1_000)
        cell.submit(f"j{number}", job_spec(workers=1), need)
    return list(CriticalThenShortest().order(cell.state))


def test_short_ones_pass_until_a_long_one_would_be_the_end_of_the_burst() -> None:
    """1,600 GPU s on four GPUs take 400 s, of which 300 s are critical."""
    assert order_of(310, 100, 200, 490, 500) == ["j4", "j3", "j0", "j1", "j2"]
    assert order_of(290, 100, 200, 510, 500) == ["j3", "j4", "j1", "j2", "j0"]


@pytest.mark.parametrize("run_s", [(None, None, None), (5, 5, 5)])
def test_equal_and_unknown_ones_start_as_they_came(run_s: tuple[int | None, ...]) -> None:
    assert order_of(*run_s) == ["j0", "j1", "j2"]


def test_who_has_no_run_time_comes_last() -> None:
    assert order_of(None, 7, 7, 7, 7, 7, 3) == ["j6", "j1", "j2", "j3", "j4", "j5", "j0"]
