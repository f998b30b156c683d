"""Vectorised `Interleaving.predict`: predicts many groups at once over arrays, for plans of jobs that all
differ.

A thousand jobs have half a million pairs, which take seconds one by one, each with all its rotations.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from penstock.scheduling.groups.interleaving import (
    AUTHORS_STEPS,
    MAX_SPEED,
    RESOURCES,
    SAME_PERIOD,
    Interleaving,
    Period,
    Times,
    authors_period,
    authors_period_or_pair,
    pair_period,
    period,
)

ROWS = 8_192  # unions at a time, so that the arrays stay in the processor's cache

Array = NDArray[np.float64]
Periods = Callable[[Sequence[Array]], Array]
"""Vectorised `Period`: one array of shape (5, unions) per member, in the order of rotation → ms, shape
(unions,)."""


def _periods(members: Sequence[Array]) -> Array:
    """As `interleaving.period`."""
    total: Array = np.zeros(members[0].shape[1])
    for shift in range(RESOURCES):
        total += np.max([one[(number + shift) % RESOURCES] for number, one in enumerate(members)], axis=0)
    return total


def _authors_periods(members: Sequence[Array]) -> Array:
    """As `interleaving.authors_period`."""
    at = [members[number] if number < len(members) else None for number in range(RESOURCES)]
    ends = [np.zeros(members[0].shape[1])]
    found: Array = np.full(members[0].shape[1], np.nan)
    rest = np.ones(members[0].shape[1], dtype=bool)
    for step in range(AUTHORS_STEPS):
        end: Array | None = None
        if (one := at[(step + 1) % RESOURCES]) is not None:
            end = ends[step] + one[3]
        if (one := at[(step + 2) % RESOURCES]) is not None:
            end = _latest(end, ends[step] + one[2])
        if step and (one := at[(step + 3) % RESOURCES]) is not None:
            end = _latest(end, ends[step - 1] + one[0] + one[1])
        ends.append(ends[step] if end is None else end)
        if step >= RESOURCES:
            now, before = ends[step + 1] - ends[step - 3], ends[step] - ends[step - 4]
            steady = rest & (np.abs(now - before) <= SAME_PERIOD * before)
            np.copyto(found, now, where=steady)
            rest &= ~steady
            if not rest.any():
                return found
    np.copyto(found, ends[AUTHORS_STEPS] - ends[AUTHORS_STEPS - RESOURCES], where=rest)
    return found


def _latest(one: Array | None, other: Array) -> Array:
    return other if one is None else np.maximum(one, other, out=other)


def _pair_periods(members: Sequence[Array]) -> Array:
    """As `interleaving.pair_period`."""
    one, other = members
    loads: Array = np.maximum(one[0] + one[1], other[2] + other[3])
    loads += np.maximum(other[0] + other[1], one[2] + one[3])
    return loads


def _authors_periods_or_pairs(members: Sequence[Array]) -> Array:
    """As `interleaving.authors_period_or_pair`."""
    found = _authors_periods(members)
    return np.minimum(found, _pair_periods(members)) if len(members) == 2 else found


PERIODS: dict[Period, Periods] = {
    period: _periods,
    authors_period: _authors_periods,
    pair_period: _pair_periods,
    authors_period_or_pair: _authors_periods_or_pairs,
}


def predicted_ms(interleaving: Interleaving, members: Array, alone: Array) -> Array:
    """`Prediction.period_ms`. `alone`: iterations of each member, shape (members, unions)."""
    periods = PERIODS[interleaving.period]
    choose = np.maximum if interleaving.worst else np.minimum
    period_ms: Array | None = None
    for order in permutations(range(len(members))):
        one = periods([members[index] for index in order])
        period_ms = one if period_ms is None else choose(period_ms, one)
    assert period_ms is not None
    period_ms = period_ms * interleaving.factors[len(members) - 1]
    period_ms = np.where(period_ms <= 0, alone.sum(axis=0), period_ms)
    if interleaving.bounded:
        period_ms = np.maximum(period_ms, alone.max(axis=0))
    return period_ms


def many_speeds(interleaving: Interleaving, groups: Sequence[Sequence[Times]]) -> list[tuple[float, ...]]:
    """`Prediction.speeds` of each group, bit for bit; all groups have the same number of members, at least
    two."""
    found: list[tuple[float, ...]] = []
    for start in range(0, len(groups), ROWS):
        members = np.ascontiguousarray(np.array(groups[start : start + ROWS]).transpose(1, 2, 0))
        alone = members[:, RESOURCES] * interleaving.factors[0]
        with np.errstate(over="ignore"):  # infinite is above MAX_SPEED
            speeds = np.minimum(MAX_SPEED, alone / predicted_ms(interleaving, members, alone))
        found += map(tuple, speeds.T.tolist())
    return found
