"""Alternating chains for maximum-weight matchings over kinds of nodes: one node left over takes a partner, whose former partner takes the next one."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

MAX_CHAIN = 6  # pairs changed because one node is left over

Pairs = dict[tuple[int, int], int]
"""(kind, kind) with the smaller first → how many such pairs; all > 0."""
Weights = Sequence[Sequence[float]]
"""Shape (kinds, kinds), symmetric, ≥ 0."""


def join(left: list[int], pairs: Pairs, one: int, other: int) -> None:
    left[one] -= 1
    left[other] -= 1
    key = (one, other) if one <= other else (other, one)
    pairs[key] = pairs.get(key, 0) + 1


def separate(left: list[int], pairs: Pairs, one: int, other: int) -> None:
    left[one] += 1
    left[other] += 1
    pairs[one, other] -= 1
    if not pairs[one, other]:
        del pairs[one, other]


class _Chain(NamedTuple):
    """One node of `free` is without a partner after these steps: in each, `taker` has left it, taken `taken`, and freed `freed`."""

    gain: float
    start: int
    free: int
    steps: tuple[tuple[int, int, int], ...]


Partner = tuple[int, int, float, int, tuple[int, int]]
"""One way to break up a pair: who is taken, who is freed, what the pair weighs, how many such pairs there are, the pair."""


def partners_of(weights: Weights, pairs: Pairs) -> list[Partner]:
    return sorted(
        (taken, freed, weights[taken][freed], count, pair)
        for pair, count in pairs.items()
        for taken, freed in {pair, pair[::-1]}
    )


def exchange_chain(
    left: list[int],
    weights: Weights,
    pairs: Pairs,
    least: float,
    partners: Sequence[Partner] | None = None,
) -> bool:
    """One left over takes a partner from a pair, whose other member takes one from a further pair, and so on, while that gains.

    The last one stays without, or goes to another one left over. Of each length and last kind only the best chain is followed. `partners`: of these pairs, where they are known.
    """
    ends = [kind for kind, count in enumerate(left) if count]
    layer = {kind: _Chain(0.0, kind, kind, ()) for kind in ends}
    if not ends:
        return False
    if partners is None:
        partners = partners_of(weights, pairs)
    for _ in range(MAX_CHAIN):
        for chain in layer.values():
            if chain.gain > least:
                _follow(left, pairs, chain)
                return True
            for end in ends:
                if chain.gain + weights[chain.free][end] > least and left[end] > (end == chain.start):
                    _follow(left, pairs, chain)
                    join(left, pairs, chain.free, end)
                    return True
        layer = _longer(layer.values(), weights, partners)
    return False


class ChainBound:
    """What no chain through these pairs can gain more than, by the same steps without regard to how often a pair is there."""

    def __init__(self, weights: Weights, partners: Sequence[Partner]) -> None:
        self._weights = np.array(weights, dtype=np.float64)
        self._step = np.full_like(self._weights, -inf)
        for taken, freed, weight, _, _ in partners:
            column = self._step[:, freed]
            np.maximum(column, self._weights[:, taken] - weight, out=column)

    def most(self, ends: Sequence[int]) -> float:
        """Of chains that begin with one of these kinds and may end with one; at least one kind."""
        last = self._weights[:, ends].max(axis=1)
        gains = last
        for _ in range(MAX_CHAIN):
            gains = np.maximum(last, (self._step + gains).max(axis=1))
        return float(gains[ends].max())


def _longer(chains: Iterable[_Chain], weights: Weights, partners: Sequence[Partner]) -> dict[int, _Chain]:
    """By last kind, the best of those that are one step longer, of equal ones the first; each breaks up a pair only as often as it is there."""
    gains: dict[int, float] = {}
    best: dict[int, tuple[_Chain, int]] = {}
    for chain in chains:
        of_free, so_far = weights[chain.free], chain.gain
        broken = _broken(chain)
        for taken, freed, weight, count, pair in partners:
            gain = so_far + of_free[taken] - weight
            if gain > gains.get(freed, -inf) and (not broken or count > broken.get(pair, 0)):
                gains[freed] = gain
                best[freed] = chain, taken
    return {
        freed: _Chain(gains[freed], chain.start, freed, (*chain.steps, (chain.free, taken, freed)))
        for freed, (chain, taken) in best.items()
    }


def _broken(chain: _Chain) -> dict[tuple[int, int], int]:
    """How many pairs of which kinds it breaks up."""
    found: dict[tuple[int, int], int] = {}
    for _, taken, freed in chain.steps:
        pair = (taken, freed) if taken <= freed else (freed, taken)
        found[pair] = found.get(pair, 0) + 1
    return found


def _follow(left: list[int], pairs: Pairs, chain: _Chain) -> None:
    for taker, taken, freed in chain.steps:
        separate(left, pairs, min(taken, freed), max(taken, freed))
        join(left, pairs, taker, taken)
