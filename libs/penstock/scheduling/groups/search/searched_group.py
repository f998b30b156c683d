"""A group in the local search (`penstock.scheduling.groups.search.group_search`): its members by kind, their
weights, and its value."""

from operator import mul
from typing import NamedTuple

from msgspec import Struct

from penstock.scheduling.groups.search.group_speeds import Kinds, Union


class Group(Struct, frozen=True, eq=False, gc=False):
    """Members by kind, with their `weights` in the same order. Made by `group_of`, or with one member."""

    members: tuple[int, ...]
    kinds: Kinds
    weights: tuple[float, ...]
    value: float
    fixed: bool
    memory_mib: int
    weight: float
    """Sum of the weights."""
    heaviest: float
    """The largest weight: an upper bound of a union's value is the larger one of both groups times the sum of
    the speeds."""


def group_of(
    members: tuple[int, ...],
    kinds: Kinds,
    weights: tuple[float, ...],
    value: float,
    fixed: bool,
    memory_mib: int,
) -> Group:
    return Group(members, kinds, weights, value, fixed, memory_mib, sum(weights), max(weights))


def by_weight(group: Group) -> tuple[float, tuple[int, ...]]:
    return group.weight, group.members


def value_of(union: Union, one: Group, other: Group) -> float:
    """Value of the two groups merged, in this order."""
    first, second = union.first, union.second
    value: float = first[0] * one.weights[0] if len(first) == 1 else sum(map(mul, first, one.weights))
    value += second[0] * other.weights[0] if len(second) == 1 else sum(map(mul, second, other.weights))
    return value


class Merge(NamedTuple):
    """A way to free GPUs: two groups become one, or (`other` None) a group is dropped."""

    loss: float
    one: Group
    other: Group | None
