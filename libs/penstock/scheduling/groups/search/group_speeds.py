"""Cached speeds of jobs that share GPUs, by their kinds,
for the search of groups (`penstock.scheduling.groups.search.group_search`)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

from msgspec import Struct

from penstock.scheduling.groups.interleaving import MAX_KNOWN

Asked = TypeVar("Asked")
Found = TypeVar("Found")
Kinds = tuple[int, ...]
"""Kinds of a group's members, ascending."""
Speeds = Callable[[Kinds], tuple[float, ...]]
"""Relative speeds in a group, > 0, of each kind in that order; for a single kind (1.0,). Equal kinds have
equal speeds."""
ManySpeeds = Callable[[Sequence[Kinds]], Sequence[tuple[float, ...]]]
"""`Speeds` of many groups at once."""
MANY = 64  # fewer are as fast one by one
NO_KINDS: frozenset[int] = frozenset()


class Union(Struct, frozen=True, gc=False):
    """Two groups merged: the new speeds of each part, in its own order."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    total: float
    """Sum of all speeds."""


class Instead(NamedTuple):
    """A group with another kind in place of one member: the new speeds."""

    others: tuple[float, ...]
    """Of the members, in their order; 0 for the one that leaves."""
    new: float
    total: float
    """Sum of all speeds."""


class Computed(dict[Asked, Found]):
    """What a function computes for each argument, once it is asked for."""

    def __init__(self, compute: Callable[[Asked], Found]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, asked: Asked) -> Found:
        found = self[asked] = self._compute(asked)
        return found


class Tables:
    """Speeds of unions of kinds, cached. `speeds` and `many_speeds`: pure."""

    def __init__(self, speeds: Speeds, many_speeds: ManySpeeds | None = None) -> None:
        """`many_speeds` None: there is no faster way for many."""
        self._speeds, self._many_speeds = speeds, many_speeds
        self._known: dict[Kinds, tuple[float, ...]] = {}
        self._foreseen: tuple[dict[Kinds, frozenset[int]], dict[Kinds, frozenset[int]]] = {}, {}
        """`instead` → group → other kinds with which all that `foresee` computes is known."""
        self._computed = 0
        """Number of entries of the next two tables."""
        self.unions: Computed[Kinds, Computed[Kinds, Union]] = Computed(
            lambda first: Computed(partial(self._union, first))
        )
        """Each group merged with each other one."""
        self.instead: Computed[int, Computed[Kinds, tuple[tuple[Instead, ...], float]]] = Computed(
            lambda kind: Computed(partial(self._instead, kind))
        )
        """Each kind in place of each member, in turn, of each group;
        and the largest of the sums of speeds."""
        self.without = lru_cache(maxsize=MAX_KNOWN)(self._without)

    def union(self, first: Kinds, second: Kinds) -> Union:
        return self.unions[first][second]

    def speeds(self, kinds: Kinds) -> tuple[float, ...]:
        found = self._known.get(kinds)
        if found is None:
            found = self._known[kinds] = self._speeds(kinds)
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
                self._foreseen = {}, {}
        return found

    def foresee(
        self, groups: Collection[Kinds], others: Collection[int | None], *, instead: bool = False
    ) -> None:
        """Computes in advance the speeds of each of these groups with each of the other kinds; `instead`: in
        place of each of its members."""
        if self._many_speeds is None:
            return
        if len(others) * (sum(map(len, groups)) if instead else len(groups)) < MANY:
            return
        kinds = {kind for kind in others if kind is not None}
        foreseen = self._foreseen[instead]
        left = [group for group in groups if not kinds <= foreseen.get(group, NO_KINDS)]
        if len(kinds) * (sum(map(len, left)) if instead else len(left)) < MANY:
            return
        parts = {part for group in left for part in _parts(group)} if instead else set(left)
        asked = {tuple(sorted((*part, kind))) for part in parts if part for kind in kinds}
        missing = sorted(asked.difference(self._known))
        if missing and (len(missing) < MANY or len(missing) + len(self._known) > MAX_KNOWN):
            return
        if missing:
            self._known.update(zip(missing, self._many_speeds(missing), strict=True))
        for group in left:
            foreseen[group] = foreseen.get(group, NO_KINDS) | kinds

    def _count(self) -> None:
        """Drops the tables that grow with pairs of groups once they are full."""
        self._computed += 1
        if self._computed > MAX_KNOWN:
            self._computed = 1
            self.unions.clear()
            self.instead.clear()

    def _union(self, first: Kinds, second: Kinds) -> Union:
        self._count()
        kinds = tuple(sorted(first + second))
        speeds = self.speeds(kinds)
        place = kinds.index
        return Union(
            tuple([speeds[place(kind)] for kind in first]),
            tuple([speeds[place(kind)] for kind in second]),
            sum(speeds),
        )

    def _without(self, kinds: Kinds, index: int) -> tuple[Kinds, tuple[float, ...]]:
        """The kinds without one, and their speeds."""
        rest = kinds[:index] + kinds[index + 1 :]
        return rest, self.speeds(rest)

    def _instead(self, kind: int, kinds: Kinds) -> tuple[tuple[Instead, ...], float]:
        self._count()
        found = []
        for index in range(len(kinds)):
            union = self.union(kinds[:index] + kinds[index + 1 :], (kind,))
            others = (*union.first[:index], 0.0, *union.first[index:])
            found.append(Instead(others, union.second[0], union.total))
        return tuple(found), max(one.total for one in found)


def _parts(kinds: Kinds) -> Iterator[Kinds]:
    """The group without each of its members."""
    return (kinds[:index] + kinds[index + 1 :] for index in range(len(kinds)))
