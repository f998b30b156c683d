"""How often chance may fail a test: counts and tails that a reader can follow."""

from math import comb

import pytest

from tests.support.chance import ONCE_IN, rate, seeds_for, sure_count, sure_hits, sure_range


def test_so_many_seeds_find_what_one_in_two_shows() -> None:
    """Twenty tosses without a head happen once in 1,048,576 runs, nineteen twice as often."""
    assert (seeds_for(0.5), seeds_for(1.0), seeds_for(0.001)) == (20, 1, 13_809)
    assert seeds_for(0.5, events=1_024) == 30, "each of a thousand kinds is asked for"


@pytest.mark.parametrize(("p_hit", "seeds"), [(0.5, 30), (0.9, 10), (0.3, 400), (0.01, 5)])
def test_sure_hits_are_the_most_that_may_be_asked_for(p_hit: float, seeds: int) -> None:
    def below(hits: int) -> float:
        return sum(comb(seeds, n) * p_hit**n * (1 - p_hit) ** (seeds - n) for n in range(hits))

    found = sure_hits(p_hit, seeds)
    assert below(found) < ONCE_IN <= below(found + 1)


def test_a_fair_coin_stays_within_its_range() -> None:
    found = sure_range(0.5, 200)
    assert (found.start, found.stop - 1) == (66, 134)
    assert sure_hits(1.0, 7) == 7


def test_counts_without_a_limit() -> None:
    """A hundred arrivals are expected: fewer than 56 come once in a million days."""
    assert (sure_count(100.0), sure_count(1.0)) == (56, 0)


def test_a_measured_rate_is_doubted() -> None:
    """All of 300 runs may still be 97 of 100, and none is no rate."""
    assert rate(300, 300) == pytest.approx(0.001 ** (1 / 300))
    assert rate(150, 300) < 0.5
    assert rate(0, 300) == 0.0
