"""The profile `penstock` costs nobody who comes from `fifo` or `liquid` anything: mean job completion time with learned run times."""

from pathlib import Path

import pytest

from tests.papers.profile_penstock import QUICK, compared, mix
from tests.papers.test_muri_baselines import needs_data

AT_WORST = 1.01


def judge(path: Path) -> None:
    by_profile = compared(path)
    best = min(by_profile[other].mean_jct_s for other in ("fifo", "liquid"))
    assert by_profile["penstock"].mean_jct_s <= AT_WORST * best


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("trace", QUICK)
def test_it_is_never_worse_on_the_traces(trace: str) -> None:
    """A cell of 64 GPUs with the jobs of a month."""
    judge(Path(f"muri/{trace}"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_it_is_never_worse_on_mixes(seed: int, tmp_path: Path) -> None:
    """Five tenants, thirty kinds of jobs."""
    path = tmp_path / "mix.csv"
    path.write_text(mix(seed))
    judge(path)
