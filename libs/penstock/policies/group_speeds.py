"""Speeds of jobs that share GPUs, by their kinds: cached tables for the search of groups (`penstock.policies.group_search`)."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

Kinds = tuple[int, ...]
"""Of a group's members, ascending."""
Speeds = Callable[[Kinds], tuple[float, ...]]
"""Relative speeds in a group, > 0, of each kind in that order; of one kind (1.0,). Equal kinds have equal speeds."""


class Union(NamedTuple):
    """Members of two groups together: what each part's speeds become, in its own order."""

    kinds: Kinds
    first: tuple[float, ...]
    second: tuple[float, ...]
    order: tuple[int, ...]
    """Of the members of the first, then of the second, those of the union by kind."""
    total: float
    """Sum of all speeds."""


class Tables:
    """Speeds of unions of kinds, cached. `speeds`: pure."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = lru_cache(maxsize=65_536)(speeds)
        self.union = lru_cache(maxsize=65_536)(self._union)
        self.without = lru_cache(maxsize=65_536)(self._without)
        self.total_instead = lru_cache(maxsize=65_536)(self._total_instead)

    def _union(self, first: Kinds, second: Kinds) -> Union:
        both = first + second
        order = tuple(sorted(range(len(both)), key=lambda index: (both[index], index)))
        kinds = tuple(both[index] for index in order)
        of_kind = dict(zip(kinds, self.speeds(kinds), strict=True))
        return Union(
            kinds,
            tuple(of_kind[kind] for kind in first),
            tuple(of_kind[kind] for kind in second),
            order,
            sum(of_kind[kind] for kind in kinds),
        )

    def _without(self, kinds: Kinds, index: int) -> tuple[Kinds, tuple[float, ...]]:
        """The others, and their speeds."""
        rest = kinds[:index] + kinds[index + 1 :]
        return rest, self.speeds(rest)

    def _total_instead(self, kinds: Kinds, index: int, kind: int) -> float:
        """Sum of all speeds with another kind in the place of one."""
        return sum(self.speeds(tuple(sorted((*kinds[:index], *kinds[index + 1 :], kind)))))
