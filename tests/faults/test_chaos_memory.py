"""Two placers, an estimator and three nodes in one process and in virtual time, over a log in bad weather."""

import pytest

from tests.faults.chaos import ChaosCell
from tests.support.virtual_time import run_virtually

GROUPS = 10
SEEDS_PER_GROUP = 25


def live(seed: int) -> int:
    """One life; fails with its seed. Returns how many void records the ledger's partition holds."""

    async def life() -> int:
        verdict = await ChaosCell(seed).live()
        assert verdict.problems == [], f"seed {seed}: {verdict.problems[:5]}; {verdict.summary()}"
        return verdict.void

    try:
        return run_virtually(life())
    except AssertionError:
        print(f"\nfailing seed: {seed}")
        raise


@pytest.mark.parametrize("group", range(GROUPS))
def test_lives_in_bad_weather(group: int, scale: int) -> None:
    """Every append may fail before the write, after it, in its middle, or land after its failure was told;
    nodes crash and repeat old messages; the two placers take the office from each other whenever one sleeps."""
    first = group * SEEDS_PER_GROUP * scale
    void = sum(live(seed) for seed in range(first, first + SEEDS_PER_GROUP * scale))
    assert void > 0, "no zombie wrote anything: the weather was too good to show something"
