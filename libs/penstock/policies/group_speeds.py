"""Cached speeds of jobs that share GPUs, by their kinds, for the search of groups (`penstock.policies.group_search`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Kinds = tuple[int, ...]
"""Kinds of a group's members, ascending."""
Speeds = Callable[[Kinds], tuple[float, ...]]
"""Relative speeds in a group, > 0, of each kind in that order; for a single kind (1.0,). Equal kinds have equal speeds."""
ManySpeeds = Callable[[Sequence[Kinds]], Sequence[tuple[float, ...]]]
"""`Speeds` of many groups at once."""
MAX_KNOWN = 262_144  # groups; 80 MB
MANY = 64  # fewer are as fast one by one


class Union(NamedTuple):
    """Two groups merged: the new speeds of each part, in its own order."""

    kinds: Kinds
    first: tuple[float, ...]
    second: tuple[float, ...]
    total: float
    """Sum of all speeds."""


class Instead(NamedTuple):
    """A group with another kind in place of one member: the new speeds."""

    others: tuple[float, ...]
    """Of the other members, in their order."""
    new: float
    total: float
    """Sum of all speeds."""


class Tables:
    """Speeds of unions of kinds, cached. `speeds` and `many_speeds`: pure."""

    def __init__(self, speeds: Speeds, many_speeds: ManySpeeds | None = None) -> None:
        """`many_speeds` None: there is no faster way for many."""
        self._speeds, self._many_speeds = speeds, many_speeds
        self._known: dict[Kinds, tuple[float, ...]] = {}
        self.union = lru_cache(maxsize=65_536)(self._union)
        self.without = lru_cache(maxsize=65_536)(self._without)
        self.instead = lru_cache(maxsize=65_536)(self._instead)

    def speeds(self, kinds: Kinds) -> tuple[float, ...]:
        found = self._known.get(kinds)
        if found is None:
            found = self._known[kinds] = self._speeds(kinds)
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
        return found

    def foresee(self, parts: Iterable[Kinds], others: Iterable[int | None]) -> None:
        """Computes in advance the speeds of each of these parts of groups with each of the other kinds."""
        if self._many_speeds is None:
            return
        kinds = {kind for kind in others if kind is not None}
        different = set(parts)
        if len(kinds) * len(different) < MANY:
            return
        asked = {tuple(sorted((*part, kind))) for part in different if part for kind in kinds}
        missing = sorted(asked.difference(self._known))
        if MANY <= len(missing) and len(missing) + len(self._known) <= MAX_KNOWN:
            self._known.update(zip(missing, self._many_speeds(missing), strict=True))

    @staticmethod
    def parts(groups: Iterable[Kinds]) -> Iterator[Kinds]:
        """Each group without each of its members."""
        return (kinds[:index] + kinds[index + 1 :] for kinds in groups for index in range(len(kinds)))

    def _union(self, first: Kinds, second: Kinds) -> Union:
        kinds = tuple(sorted(first + second))
        speeds = self.speeds(kinds)
        place = kinds.index
        return Union(
            kinds,
            tuple([speeds[place(kind)] for kind in first]),
            tuple([speeds[place(kind)] for kind in second]),
            sum(speeds),
        )

    def _without(self, kinds: Kinds, index: int) -> tuple[Kinds, tuple[float, ...]]:
        """The kinds without one, and their speeds."""
        rest = kinds[:index] + kinds[index + 1 :]
        return rest, self.speeds(rest)

    def _instead(self, kinds: Kinds, kind: int) -> tuple[tuple[Instead, ...], float]:
        """The group with another kind in place of each of its members in turn, and the largest of the sums of speeds."""
        found = []
        for index in range(len(kinds)):
            union = self.union(kinds[:index] + kinds[index + 1 :], (kind,))
            found.append(Instead(union.first, union.second[0], union.total))
        return tuple(found), max(one.total for one in found)
