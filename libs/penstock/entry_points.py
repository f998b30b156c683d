"""Plug-in registry: what installed packages add to Penstock, by entry points of one group.

The names of a group are read once per process, and an object is imported when its name is first asked for:
who asks for none pays for neither. Entry points are part of the installation, as the code is. So the same
installation gives the same answer, in each process and at any time.
"""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Generic, TypeVar

T = TypeVar("T")


class Group(Generic[T]):
    """The entry points of one group, each the name of an object of type `T`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: dict[str, T] = {}
        """Name → object, of those that were asked for. A test adds its own for its length
        (`mock.patch.dict`)."""

    @cached_property
    def _found(self) -> Mapping[str, EntryPoint]:
        return _entries(self.name)

    def names(self) -> list[str]:
        """In the order of the alphabet."""
        return sorted({*self._found, *self.loaded})

    def get(self, name: str) -> T | None:
        """The object of this name; None: no installed package has it. Raises ImportError if it cannot be
        imported."""
        found = self.loaded.get(name)
        if found is None and (entry := self._found.get(name)) is not None:
            found = self.loaded[name] = entry.load()
        return found


def _entries(group: str) -> Mapping[str, EntryPoint]:
    """Name → entry point, without those whose package is missing: a wheel may have been built without it."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    packages = {name: entry.module.partition(".")[0] for name, entry in found.items()}
    there = {package for package in {*packages.values()} if find_spec(package) is not None}
    return {name: entry for name, entry in found.items() if packages[name] in there}
