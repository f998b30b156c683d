"""The profile `penstock` costs nobody who comes from `fifo` or `liquid` anything: mean job completion time with learned run times."""

from tests.papers.profile_penstock import MIX, jct_ratio

AT_WORST = 1.01


def test_it_is_never_worse_on_a_mix() -> None:
    """Five tenants, thirty kinds of jobs. More mixes, and traces: `python -m tests.papers.profile_penstock`."""
    assert jct_ratio(f"{MIX}0") <= AT_WORST
