"""γ of many unions of groups at once, over arrays (`penstock.scheduling.groups.many_groups`), as weights of a
matching."""

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduling.groups.interleaving import RESOURCES, Interleaving, Times
from penstock.scheduling.groups.many_groups import ROWS, Array, predicted_ms


class Unit(NamedTuple):
    """A group that may become part of a union."""

    times: tuple[Times, ...]
    """Times of its members; empty: it cannot share."""
    fixed: bool
    """Whether its members must stay on their GPUs: no two such units may be merged."""
    memory_mib: int


def union_efficiencies(
    interleaving: Interleaving, units: Sequence[Unit], max_members: int, memory_mib: int
) -> Array:
    """γ, shape (units, units), symmetric, 0 – 1; 0 where two may not share, and on the diagonal.
    `memory_mib`: of a GPU; 0: not bounded."""
    found: Array = np.zeros((len(units), len(units)))
    of_size: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        if unit.times:
            of_size.setdefault(len(unit.times), []).append(number)
    for one, other in combinations_with_replacement(sorted(of_size), 2):
        if one + other <= max_members:
            _fill(found, interleaving, units, of_size[one], of_size[other])
    fixed = np.array([unit.fixed for unit in units], dtype=bool)
    found[np.ix_(fixed, fixed)] = 0.0
    if memory_mib:
        memories = np.array([unit.memory_mib for unit in units])
        found[memories[:, None] + memories[None, :] > memory_mib] = 0.0
    np.fill_diagonal(found, 0.0)
    return found


def _fill(
    found: Array,
    interleaving: Interleaving,
    units: Sequence[Unit],
    ones: Sequence[int],
    others: Sequence[int],
) -> None:
    """Computes unions of units of one size with units of another, or of the same size."""
    first, second = (np.array([units[number].times for number in numbers]) for numbers in (ones, others))
    rows, columns = np.triu_indices(len(ones), 1) if ones is others else _all(len(ones), len(others))
    at, by = np.array(ones), np.array(others)
    for start in range(0, len(rows), ROWS):
        row, column = rows[start : start + ROWS], columns[start : start + ROWS]
        both = np.concatenate((first[row], second[column]), axis=1)
        efficiencies = _efficiencies(interleaving, np.ascontiguousarray(both.transpose(1, 2, 0)))
        found[at[row], by[column]] = efficiencies
        found[by[column], at[row]] = efficiencies


def _all(rows: int, columns: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    grid = np.indices((rows, columns))
    return grid[0].ravel(), grid[1].ravel()


def _efficiencies(interleaving: Interleaving, members: Array) -> Array:
    """`members`: shape (members, 5, unions)."""
    period_ms = predicted_ms(interleaving, members, members[:, RESOURCES] * interleaving.factors[0])
    used_ms = members[:, :RESOURCES].sum(axis=(0, 1))
    found: Array = np.minimum(1.0, used_ms / (RESOURCES * period_ms))
    return found
