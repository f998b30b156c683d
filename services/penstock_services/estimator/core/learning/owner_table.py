"""Bounded table with a quota per owner: least recently used (LRU) eviction, so that no owner evicts the
entries of others.

Entries are grouped by key, and each belongs to one owner. Owner "" stands for no owner: it has no quota, and
its entries go with their key.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
NO_OWNER = ""


class OwnerTable(Generic[Key, Value]):
    """(key, owner) → value. Keys and an owner's keys are in the order of their last use, a key's owners in
    that of theirs."""

    def __init__(self, keys: int, keys_of_one: int, owners_of_key: int = 1) -> None:
        """Upper bounds: of keys in all, of one owner's keys, of one key's owners."""
        self._keys, self._keys_of_one, self._owners_of_key = keys, keys_of_one, owners_of_key
        self._values: OrderedDict[Key, OrderedDict[str, Value]] = OrderedDict()
        self._keys_of: dict[str, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        """Keys."""
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key, owner: str) -> Value | None:
        """Without counting as a use."""
        values = self._values.get(key)
        return None if values is None else values.get(owner)

    def of_key(self, key: Key) -> Mapping[str, Value]:
        """Owner → value, the owner that was put first (again) first; {} for an unknown key."""
        return MappingProxyType(self._values.get(key, {}))

    def of_owner(self, owner: str) -> Iterator[tuple[Key, Value]]:
        """The owner's keys with their values."""
        return ((key, self._values[key][owner]) for key in self._keys_of.get(owner, ()))

    def use(self, key: Key) -> None:
        """A known key was used."""
        self._values.move_to_end(key)

    def put(self, key: Key, owner: str, value: Value, *, moves: bool = True) -> None:
        """Counts as a use. `moves`: also among the key's owners."""
        values = self._values.setdefault(key, OrderedDict())
        self._values.move_to_end(key)
        values[owner] = value
        if owner != NO_OWNER:
            mine = self._keys_of.setdefault(owner, OrderedDict())
            mine[key] = None
            mine.move_to_end(key)
            if moves:
                values.move_to_end(owner)
            if len(values) - (NO_OWNER in values) > self._owners_of_key:
                self.remove(key, next(one for one in values if one != NO_OWNER))
            if len(mine) > self._keys_of_one:
                self.remove(next(iter(mine)), owner)
        if len(self._values) > self._keys:
            oldest = next(iter(self._values))
            for one in tuple(self._values[oldest]):
                self.remove(oldest, one)

    def remove(self, key: Key, owner: str) -> None:
        """One known entry; the key goes with its last owner."""
        values = self._values.get(key)
        if values is None:
            return
        del values[owner]
        if owner != NO_OWNER:
            mine = self._keys_of[owner]
            del mine[key]
            if not mine:
                del self._keys_of[owner]
        if not values.keys() - {NO_OWNER} and (owner != NO_OWNER or not values):
            self._values.pop(key, None)
