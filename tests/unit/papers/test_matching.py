"""Which groups merge: weights against a full matching by rustworkx, and what must hold of any answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_papers.muri.matching import match_distinct, match_kinds
from tests.support.cluster.matchings import ENOUGH, ENOUGH_OF_FEW, expanded, full_weight, weight_of


@st.composite
def problems(draw: st.DrawFn, most: int) -> tuple[list[int], list[list[float]]]:
    counts = draw(st.lists(st.integers(0, most), min_size=0, max_size=8))
    one_weight = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0])
    weights = [[0.0] * len(counts) for _ in counts]
    for one in range(len(counts)):
        for other in range(one + 1):
            weights[one][other] = weights[other][one] = draw(one_weight)
    return counts, weights


@settings(deadline=None)
@given(problems(most=6))
def test_no_node_is_in_two_pairs_and_no_pair_is_worth_nothing(
    problem: tuple[list[int], list[list[float]]],
) -> None:
    counts, weights = problem
    pairs = match_kinds(counts, weights)
    used = [0] * len(counts)
    for (one, other), count in pairs.items():
        assert one <= other
        assert count > 0
        assert weights[one][other] > 0
        used[one] += count
        used[other] += count
    assert all(taken <= there for taken, there in zip(used, counts, strict=True))
    assert match_kinds(counts, weights) == pairs


@pytest.mark.parametrize("nodes", [40, 200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_kinds_have_nearly_the_weight_of_a_full_matching(nodes: int) -> None:
    """A thousand jobs of eight kinds: the full matching takes seconds."""
    rng = np.random.Generator(np.random.PCG64(nodes))
    for _ in range(10 if nodes <= 200 else 1):
        half = rng.random((8, 8))
        weights = (half + half.T).tolist()
        counts = rng.multinomial(nodes, [1 / 8] * 8).tolist()
        assert weight_of(match_kinds(counts, weights), weights) >= ENOUGH * full_weight(
            expanded(counts, weights)
        )


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_few_nodes_are_matched_exactly(nodes: int) -> None:
    """Two GPUs, a handful of jobs: nothing is left to rounding."""
    rng = np.random.Generator(np.random.PCG64(nodes))
    for _ in range(50):
        half = rng.random((nodes, nodes))
        weights = half + half.T
        pairs = match_kinds([1] * nodes, weights.tolist())
        assert weight_of(pairs, weights.tolist()) == pytest.approx(
            full_weight(weights - np.diag(np.diag(weights)))
        )


def test_rounding_loses_nothing_on_random_problems() -> None:
    """Few and many nodes, weights with many ties and with none: chains of changes mend what rounding halves
    has broken."""
    rng = np.random.Generator(np.random.PCG64(1))
    for number in range(300):
        kinds = int(rng.integers(1, 10))
        counts = rng.integers(0, int(rng.choice([1, 2, 3, 8])) + 1, kinds).tolist()
        half = rng.random((kinds, kinds))
        weights = np.round(half * 4) / 4 if number % 2 else half
        weights = (weights + weights.T).tolist()
        found = weight_of(match_kinds(counts, weights), weights)
        assert found == pytest.approx(full_weight(expanded(counts, weights))), (counts, weights)


@pytest.mark.parametrize("nodes", [2, 9, 100, 300, pytest.param(1_000, marks=pytest.mark.slow)])
def test_nodes_that_all_differ(nodes: int) -> None:
    rng = np.random.Generator(np.random.PCG64(nodes))
    half = rng.random((nodes, nodes))
    weights = half + half.T
    pairs = match_distinct(weights)
    members = [node for pair in pairs for node in pair]
    assert len(set(members)) == len(members)
    found = sum(float(weights[pair]) for pair in pairs)
    enough = ENOUGH if nodes >= 1_000 else ENOUGH_OF_FEW
    assert found >= enough * full_weight(weights - np.diag(np.diag(weights)))


def test_thousands_of_one_kind() -> None:
    assert match_kinds([9_999], [[0.5]]) == {(0, 0): 4_999}
    assert match_kinds([1], [[0.5]]) == {}
    assert match_kinds([], []) == {}
    assert match_distinct(np.zeros((0, 0))) == []
