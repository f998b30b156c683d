"""A group in the local search (`penstock.policies.group_search`): its members by kind, their weights, and its value."""

from operator import mul
from typing import NamedTuple

from penstock.policies.group_speeds import Kinds, Union


class Group:
    """Members by kind, with their `weights` in the same order. Immutable."""

    __slots__ = ("fixed", "heaviest", "kinds", "members", "memory_mib", "value", "weight", "weights")

    def __init__(
        self,
        members: tuple[int, ...],
        kinds: Kinds,
        weights: tuple[float, ...],
        value: float,
        fixed: bool,
        memory_mib: int,
    ) -> None:
        self.members, self.kinds, self.weights, self.value = members, kinds, weights, value
        # Upper bound of a union's value: the heaviest weight times the sum of the speeds.
        if len(weights) == 1:
            self.weight = self.heaviest = weights[0]
        else:
            self.weight, self.heaviest = sum(weights), max(weights)
        self.fixed, self.memory_mib = fixed, memory_mib


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
