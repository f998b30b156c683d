"""Alternating chains for maximum-weight matchings over kinds of nodes: an unmatched node takes a partner,
whose former partner takes the next one."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

MAX_CHAIN = 6  # pairs changed by one chain

Pairs = dict[tuple[int, int], int]
"""(kind, kind) with the smaller first → number of such pairs; all > 0."""
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
    """A chain of steps (taker, taken, freed), after which one node of kind `free` is unmatched. `cost`: of
    the new pairs (`Duals.costs`)."""

    gain: float
    cost: float
    start: int
    free: int
    steps: tuple[tuple[int, int, int], ...]


Partner = tuple[int, int, float, int, tuple[int, int]]
"""One way to break up a pair: (kind taken, kind freed, the pair's weight, number of such pairs, the pair)."""


def partners_of(weights: Weights, pairs: Pairs) -> list[Partner]:
    return sorted(
        (taken, freed, weights[taken][freed], count, pair)
        for pair, count in pairs.items()
        for taken, freed in {pair, pair[::-1]}
    )


class Duals:
    """Dual bound of a matching by its relaxation: a matching's weight is Σ price · nodes, less the costs of
    its pairs, and less the prices of unmatched nodes.

    `prices`: an optimal dual solution of the relaxation, ≥ 0, by kind; `weights` ≤ the sum of both prices.
    The slack of a matching is the difference between that sum and its weight. In a matching of larger weight
    the total cost of any pairs is less than this slack.
    """

    def __init__(self, counts: Sequence[int], weights: Weights, prices: Sequence[float]) -> None:
        self.costs = [
            [price + other - weight for other, weight in zip(prices, row, strict=True)]
            for price, row in zip(prices, weights, strict=True)
        ]
        """Cost of a pair of these kinds, ≥ 0 except for rounding."""
        self._weights = weights
        self._most = sum(price * count for price, count in zip(prices, counts, strict=True))
        if sum(counts) % 2:  # one node stays unmatched
            self._most -= min(price for price, count in zip(prices, counts, strict=True) if count)

    def slack(self, pairs: Pairs) -> float:
        """Upper bound of how much a matching's weight can exceed that of these pairs."""
        return self._most - sum(self._weights[one][other] * count for (one, other), count in pairs.items())


def exchange_chain(
    left: list[int],
    weights: Weights,
    pairs: Pairs,
    least: float,
    costs: Weights,
    slack: float,
    partners: Sequence[Partner] | None = None,
) -> bool:
    """Applies one chain that gains: an unmatched node takes a partner from a pair, whose other member takes
    one from a further pair, and so on.

    The last node stays unmatched, or joins another unmatched node. Of each length and last kind only the best
    chain is continued, and none whose new pairs cost `slack` or more (`Duals`). `partners`: `partners_of`
    these pairs, if already computed.
    """
    ends = [kind for kind, count in enumerate(left) if count]
    layer = {kind: _Chain(0.0, 0.0, kind, kind, ()) for kind in ends}
    if partners is None and ends:
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
        if not layer:
            return False
        layer = _longer(layer.values(), weights, partners or (), costs, slack)
    return False


def _longer(
    chains: Iterable[_Chain], weights: Weights, partners: Sequence[Partner], costs: Weights, slack: float
) -> dict[int, _Chain]:
    """Last kind → the best chain that is one step longer, of equal ones the first; each breaks up a pair at
    most as often as it exists."""
    gains = [-inf] * len(weights)
    best: dict[int, tuple[_Chain, int]] = {}
    for chain in chains:
        of_free, so_far, left = weights[chain.free], chain.gain, slack - chain.cost
        of_costs = costs[chain.free]
        broken = _broken(chain)
        for taken, freed, weight, count, pair in partners:
            if of_costs[taken] < left:
                gain = so_far + of_free[taken] - weight
                if gain > gains[freed] and (not broken or count > broken.get(pair, 0)):
                    gains[freed] = gain
                    best[freed] = chain, taken
    return {
        freed: _Chain(
            gains[freed],
            chain.cost + costs[chain.free][taken],
            chain.start,
            freed,
            (*chain.steps, (chain.free, taken, freed)),
        )
        for freed, (chain, taken) in best.items()
    }


def _broken(chain: _Chain) -> dict[tuple[int, int], int]:
    """Pair of kinds → how many such pairs the chain breaks up."""
    found: dict[tuple[int, int], int] = {}
    for _, taken, freed in chain.steps:
        pair = (taken, freed) if taken <= freed else (freed, taken)
        found[pair] = found.get(pair, 0) + 1
    return found


def _follow(left: list[int], pairs: Pairs, chain: _Chain) -> None:
    for taker, taken, freed in chain.steps:
        separate(left, pairs, min(taken, freed), max(taken, freed))
        join(left, pairs, taker, taken)
