"""Maximum-weight matching of groups to merge in pairs, without forced cardinality.

`match_kinds`: nodes of a kind are interchangeable, so only the number of pairs of each two kinds matters (an
integer b-matching over kinds). The relaxation over the bipartite double cover is a transportation problem
with as many rows as kinds, solved by shortest augmenting paths that move many units at once; its optimum is
half-integral, and the few halves are rounded. `match_distinct`: all nodes differ; the same relaxation is an
assignment problem, whose cycles are cut into pairs. `match_many_kinds`: the heavier one of both.

Source: the relaxation is half-integral (Balinski 1965); shortest augmenting paths as in Jonker and Volgenant
1987. Departure from an exact matching (Muri §4.2 names Edmonds' blossoms): odd cycles of halves are broken by
the best of few choices and pairs exchanged while the weight grows, so it may be less than the maximum by part
of one pair. Weights are ≥ 0; a pair of weight 0 is never made.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock_papers.muri.matching_chains import (
    Duals,
    Pairs,
    Weights,
    exchange_chain,
    join,
    partners_of,
    separate,
)

MAX_EXACT = 8  # unmatched nodes after rounding: up to so many exhaustive search, more greedily
MAX_KINDS = 128  # of more, only distinct nodes are matched: they then have as heavy a matching
MAX_EXCHANGES = 10_000  # each exchange gains, so the bound matters only for rounding errors
GAIN = 1e-12  # relative to the largest weight: a smaller gain is ignored


def match_kinds(counts: Sequence[int], weights: Weights) -> Pairs:
    """The matching over kinds. `counts`: nodes of each kind, ≥ 0. Deterministic; about O(kinds³), and
    exchanges that may take far longer (`match_many_kinds`)."""
    return _match(counts, weights, exchange=True)


def match_many_kinds(counts: Sequence[int], weights: NDArray[np.float64]) -> Pairs:
    """As `match_kinds` for more kinds than exchanges are worth: the heavier one of a matching over kinds
    without exchanges and of one of distinct nodes.

    `counts`: each ≥ 1; `weights`: shape (kinds, kinds), symmetric, ≥ 0. Deterministic; O(nodes³) in compiled
    code.
    """
    kind_of = np.repeat(np.arange(len(counts)), counts)
    distinct = Counter(
        (int(kind_of[one]), int(kind_of[other]))
        for one, other in match_distinct(weights[np.ix_(kind_of, kind_of)])
    )
    if max(counts) == 1 or len(counts) > MAX_KINDS:
        return distinct
    table = weights.tolist()
    return max(distinct, _match(counts, table, exchange=False), key=lambda pairs: _weight_of(pairs, table))


def _weight_of(pairs: Pairs, weights: Weights) -> float:
    return sum(weights[one][other] * count for (one, other), count in pairs.items())


def _match(counts: Sequence[int], weights: Weights, *, exchange: bool) -> Pairs:
    kinds = [kind for kind, count in enumerate(counts) if count]
    if not kinds:
        return {}
    present = [counts[kind] for kind in kinds]
    left = list(present)
    table = [[weights[one][other] for other in kinds] for one in kinds]
    for index, count in enumerate(left):
        if count < 2:
            table[index][index] = 0.0
    flows, prices = _transport(left, table)
    pairs = _rounded(flows, table)
    for (one, other), count in pairs.items():
        left[one] -= count
        left[other] -= count
    _match_rest(left, table, pairs)
    if exchange:
        _exchange(left, table, pairs, Duals(present, table, prices))
    return {
        (kinds[one], kinds[other]): count
        for (one, other), count in sorted(pairs.items())
        if count and table[one][other] > 0
    }


def _transport(counts: Sequence[int], weights: Weights) -> tuple[list[list[int]], list[float]]:
    """Units from each row to each column that maximise Σ weight · units; rows and columns have `counts`
    units, of which some may stay unassigned. And the price of each kind: the mean of its row's and its
    column's price."""
    size = len(counts)
    spare = list(counts)
    flows = [[0] * size for _ in counts]
    row_price = [max(row) for row in weights]
    column_price = [0.0] * size
    for source in range(size):
        rest = counts[source]
        while rest:
            moved = _augment(source, rest, spare, flows, weights, row_price, column_price)
            if not moved:
                break
            rest -= moved
    prices = [(row + column) / 2 for row, column in zip(row_price, column_price, strict=True)]
    return flows, prices


def _augment(
    source: int,
    rest: int,
    spare: list[int],
    flows: list[list[int]],
    weights: Weights,
    row_price: list[float],
    column_price: list[float],
) -> int:
    """Moves units along one shortest path by reduced costs row_price + column_price − weight ≥ 0; returns how
    many, 0: the rest of the row stays unassigned.

    A row's price is the value of its units; at 0 they may as well stay unassigned, or instead those of
    another row on the path.
    """
    size = len(spare)
    infinity = float("inf")
    distance = [infinity] * size
    through = [-1] * size
    done = [False] * size
    row_distance = {source: 0.0}
    reached_by = {source: -1}
    row, keep, keeper = source, row_price[source], source
    while True:
        base, price, of_row = row_distance[row], row_price[row], weights[row]
        for column in range(size):
            if not done[column]:
                cost = base + price + column_price[column] - of_row[column]
                if cost < distance[column]:
                    distance[column], through[column] = cost, row
        # rows that are reached at no additional cost come first, then the nearest column
        column, nearest = -1, infinity
        for one, far in enumerate(distance):
            if far < nearest and not done[one]:
                column, nearest = one, far
        if keep <= nearest:
            end, length = -1, keep
            break
        done[column] = True
        if spare[column]:
            end, length = column, nearest
            break
        fresh = [one for one in range(size) if flows[one][column] and one not in row_distance]
        for one in fresh:
            row_distance[one], reached_by[one] = nearest, column
            if nearest + row_price[one] < keep:
                keep, keeper = nearest + row_price[one], one
        found = _relax(fresh, row_distance, row_price, column_price, weights, distance, through, done)
        row = found if found >= 0 else row
    for one, reached in row_distance.items():
        row_price[one] -= max(0.0, length - reached)
    for column in range(size):
        if distance[column] < length:
            column_price[column] += length - distance[column]
    return _move(source, rest, end, keeper, spare, flows, through, reached_by)


def _relax(
    fresh: Sequence[int],
    row_distance: dict[int, float],
    row_price: list[float],
    column_price: list[float],
    weights: Weights,
    distance: list[float],
    through: list[int],
    done: list[bool],
) -> int:
    """Relaxes the edges of newly reached rows except the last, which is returned (−1: no new row)."""
    for row in fresh[:-1]:
        base, of_row = row_distance[row] + row_price[row], weights[row]
        for column, price in enumerate(column_price):
            if not done[column] and base + price - of_row[column] < distance[column]:
                distance[column], through[column] = base + price - of_row[column], row
    return fresh[-1] if fresh else -1


def _move(
    source: int,
    rest: int,
    end: int,
    keeper: int,
    spare: list[int],
    flows: list[list[int]],
    through: list[int],
    reached_by: dict[int, int],
) -> int:
    """Moves units along the path found;
    `end` −1: the path ends with units of row `keeper` becoming unassigned."""
    moved = rest if end < 0 else min(rest, spare[end])
    path: list[tuple[int, int, int]] = []
    """(row, column, 1 or −1)."""
    if end < 0:
        row = keeper
    else:
        row = through[end]
        path.append((row, end, 1))
    while row != source:
        column = reached_by[row]
        path.append((row, column, -1))
        moved = min(moved, flows[row][column])
        row = through[column]
        path.append((row, column, 1))
    if end < 0 and keeper == source:
        return 0
    for row, column, sign in path:
        flows[row][column] += sign * moved
    if end >= 0:
        spare[end] -= moved
    return moved


def _rounded(flows: Sequence[Sequence[int]], weights: Weights) -> Pairs:
    """Rounds the mean of a flow and its transpose to whole pairs. Halves form trails; on each trail every
    second half is rounded up."""
    pairs: Pairs = {}
    halves: list[tuple[int, int]] = []
    for one in range(len(flows)):
        for other in range(one, len(flows)):
            twice = flows[one][other] if one == other else flows[one][other] + flows[other][one]
            if not weights[one][other] > 0:
                continue
            if twice >= 2:
                pairs[one, other] = twice // 2
            if twice % 2:
                halves.append((one, other))
    for trail in _trails(halves):
        edges = [(min(edge), max(edge)) for edge in pairwise(trail)]
        closed, length = trail[0] == trail[-1], len(edges)
        ways = length if closed and length % 2 else 2
        most = length // 2 if closed else length
        chosen: list[tuple[int, int]] = []
        best = -1.0
        for way in range(ways):
            steps = range(way, way + 2 * most, 2) if closed else range(way, most, 2)
            found = [edges[step % length] for step in steps]
            weight = sum(weights[one][other] for one, other in found)
            if weight > best:
                best, chosen = weight, found
        for edge in chosen:
            pairs[edge] = pairs.get(edge, 0) + 1
    return pairs


def _trails(edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Decomposes the edges into a minimal number of trails, each given by the nodes that it visits. Source:
    Hierholzer 1873.

    Open trails are closed by edges to an auxiliary node, −1, and cut there.
    """
    at: dict[int, list[int]] = {}
    both = list(edges)
    for number, (one, other) in enumerate(both):
        at.setdefault(one, []).append(number)
        if other != one:
            at.setdefault(other, []).append(number)
    for node in sorted(at):
        if sum(2 if both[number][0] == both[number][1] else 1 for number in at[node]) % 2:
            both.append((-1, node))
            at[node].append(len(both) - 1)
            at.setdefault(-1, []).append(len(both) - 1)
    used = [False] * len(both)
    trails: list[list[int]] = []
    for start in sorted(at):
        stack, circuit = [start], []
        while stack:
            node = stack[-1]
            while at[node] and used[at[node][-1]]:
                at[node].pop()
            if at[node]:
                number = at[node].pop()
                used[number] = True
                one, other = both[number]
                stack.append(other if node == one else one)
            else:
                circuit.append(stack.pop())
        trail: list[int] = []
        for node in circuit:
            if node >= 0:
                trail.append(node)
                continue
            if len(trail) > 1:
                trails.append(trail)
            trail = []
        if len(trail) > 1:
            trails.append(trail)
    return trails


def _match_rest(left: list[int], weights: Weights, pairs: Pairs) -> None:
    """Matches nodes that rounding left unmatched: greedily by weight while there are many,
    then by exhaustive search."""
    kinds = range(len(left))
    heaviest = sorted(
        ((weights[one][other], -one, -other) for one in kinds for other in range(one, len(left))),
        reverse=True,
    )
    for weight, one, other in heaviest:
        if sum(left) <= MAX_EXACT or weight <= 0:
            break
        while sum(left) > MAX_EXACT and _both(left, -one, -other):
            join(left, pairs, -one, -other)
    if 2 <= sum(left) <= MAX_EXACT:

        @lru_cache(None)
        def best(rest: tuple[int, ...]) -> tuple[float, tuple[tuple[int, int], ...]]:
            first = next((kind for kind in kinds if rest[kind]), None)
            if first is None:
                return 0.0, ()
            without = list(rest)
            without[first] -= 1
            found = best(tuple(without))
            for other in kinds:
                if without[other] and weights[first][other] > 0:
                    both = list(without)
                    both[other] -= 1
                    weight, chosen = best(tuple(both))
                    if weight + weights[first][other] > found[0]:
                        found = weight + weights[first][other], (*chosen, (first, other))
            return found

        for one, other in best(tuple(left))[1]:
            join(left, pairs, one, other)


def _both(left: Sequence[int], one: int, other: int) -> bool:
    return left[one] >= 2 if one == other else left[one] > 0 and left[other] > 0


def _exchange(left: list[int], weights: Weights, pairs: Pairs, duals: Duals) -> None:
    """Local search while it gains and the relaxation's bound is not reached: two pairs exchange partners, or
    an unmatched node starts an alternating chain."""
    least = GAIN * max((max(row) for row in weights), default=0.0)
    for _ in range(MAX_EXCHANGES):
        slack = duals.slack(pairs)
        if slack <= least / 2 or not (
            _swap(left, weights, pairs, least)
            or exchange_chain(left, weights, pairs, least, duals.costs, slack)
            or _rematch(left, weights, pairs, least, duals.costs, slack)
        ):
            return


def _rematch(
    left: list[int], weights: Weights, pairs: Pairs, least: float, costs: Weights, slack: float
) -> bool:
    """Breaks up a pair that is the only one of its kinds, as rounding leaves them, where a chain from one of
    its nodes gains more than the pair's weight."""
    alone = sorted(pair for pair, count in pairs.items() if count == 1)
    partners = partners_of(weights, pairs) if alone else []
    for one, other in alone:
        separate(left, pairs, one, other)
        others = [partner for partner in partners if partner[-1] != (one, other)]
        if exchange_chain(left, weights, pairs, weights[one][other] + least, costs, slack, others):
            return True
        join(left, pairs, one, other)
    return False


def _swap(left: list[int], weights: Weights, pairs: Pairs, least: float) -> bool:
    found = sorted(pairs)
    for number, (a, b) in enumerate(found):
        of_a, of_b, apart = weights[a], weights[b], weights[a][b]
        for c, d in found[number:]:
            before = apart + weights[c][d] + least
            if of_a[c] + of_b[d] > before:
                new = ((a, c), (b, d))
            elif of_a[d] + of_b[c] > before:
                new = ((a, d), (b, c))
            else:
                continue
            if (a, b) == (c, d) and pairs[a, b] < 2:
                continue
            separate(left, pairs, a, b)
            separate(left, pairs, c, d)
            for one, other in new:
                join(left, pairs, one, other)
            return True
    return False


def match_distinct(weights: NDArray[np.float64]) -> list[tuple[int, int]]:
    """The matching of distinct nodes: pairs, the smaller node first, ascending. `weights`: shape (nodes,
    nodes), symmetric, ≥ 0; the diagonal is ignored."""
    weights = np.array(weights, dtype=np.float64)
    np.fill_diagonal(weights, 0.0)
    pairs: list[tuple[int, int]] = []
    rest = np.arange(len(weights))
    while len(rest) > 1:
        found, over = _assign(weights[np.ix_(rest, rest)])
        pairs += [(int(rest[one]), int(rest[other])) for one, other in found]
        if not found:
            break
        rest = rest[over]
    pairs = _improve(weights, pairs)
    return sorted((min(pair), max(pair)) for pair in pairs if weights[pair] > 0)


def _assign(weights: NDArray[np.float64]) -> tuple[list[tuple[int, int]], list[int]]:
    """(pairs, unmatched nodes) of one assignment: even cycles are cut in one of two ways, of odd cycles one
    node is left out."""
    from scipy.optimize import linear_sum_assignment  # a third of a placer's start, which matches nothing

    _, partners = linear_sum_assignment(weights, maximize=True)
    pairs: list[tuple[int, int]] = []
    over: list[int] = []
    seen = [False] * len(weights)
    for start in range(len(weights)):
        cycle: list[int] = []
        node = start
        while not seen[node]:
            seen[node] = True
            cycle.append(node)
            node = int(partners[node])
        if len(cycle) < 2:
            over += cycle
        else:
            _cut(weights, cycle, pairs, over)
    return pairs, sorted(over)


def _cut(
    weights: NDArray[np.float64], cycle: list[int], pairs: list[tuple[int, int]], over: list[int]
) -> None:
    """Takes every second edge; the heavier of both ways, or of all ways to leave one node out."""
    length = len(cycle)
    ways = 2 if length % 2 == 0 else length
    edges = [float(weights[cycle[index], cycle[(index + 1) % length]]) for index in range(length)]
    best, first = max(
        (sum(edges[(way + 2 * step) % length] for step in range(length // 2)), -way) for way in range(ways)
    )
    del best
    for step in range(length // 2):
        at = (-first + 2 * step) % length
        pairs.append((cycle[at], cycle[(at + 1) % length]))
    if length % 2:
        over.append(cycle[(-first + length - 1) % length])


def _improve(weights: NDArray[np.float64], pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Exchanges partners of two pairs while that gains, at most as often as there are pairs."""
    if len(pairs) < 2:
        return pairs
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    for _ in range(len(pairs)):
        now = weights[a, b]
        together = now[:, None] + now[None, :]
        straight = weights[np.ix_(a, a)] + weights[np.ix_(b, b)] - together
        crossed = weights[np.ix_(a, b)] + weights[np.ix_(b, a)] - together
        for gains in (straight, crossed):
            np.fill_diagonal(gains, 0.0)
        best = max(float(straight.max()), float(crossed.max()))
        if best <= GAIN * float(weights.max()):
            break
        way = straight if float(straight.max()) == best else crossed
        one, other = divmod(int(np.argmax(way)), len(pairs))
        if way is straight:
            b[one], a[other] = a[other], b[one]
        else:
            b[one], b[other] = b[other], b[one]
    return list(zip(a.tolist(), b.tolist(), strict=True))
