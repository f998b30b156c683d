"""The profile `penstock` costs nobody who comes from `fifo` or `liquid` anything: mean job completion time
with learned run times."""

import pytest

from tests.papers.default.profile_penstock import MIX, jct_ratio
from tests.papers.muri.test_muri_baselines import needs_data

AT_WORST = 1.01


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("trace", ["trace3", "trace3_pr"])
def test_it_is_never_worse_on_the_traces(trace: str) -> None:
    """A cell of 64 GPUs with the jobs of a month. More of them: `python -m
    tests.papers.default.profile_penstock`."""
    assert jct_ratio(f"muri/{trace}") <= AT_WORST


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_it_is_never_worse_on_mixes(seed: int) -> None:
    """Five tenants, thirty kinds of jobs."""
    assert jct_ratio(f"{MIX}{seed}") <= AT_WORST
