"""A mutant against a promise: one line of the product changed, and who ought to notice."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.faults.laboratory.patching import changed_source, edited

MUTANTS: dict[str, "Mutant"] = {}
"""By what each breaks, in words."""


class Mutant(NamedTuple):
    """`point`: of the promises. `judge`: which random judge noticed the mutant, at which `seed`, with which
    `options`; empty: none does. `tests`: those that belong to the changed module."""

    name: str
    point: int
    scene: str
    """Which promise is broken, from users' life."""
    edits: tuple[tuple[Any, str, str], ...]
    """(function or property, piece of its source, what stands there instead)."""
    judge: str
    seed: int
    options: dict[str, Any]
    tests: tuple[str, ...]

    def put_in(self) -> None:
        """Changes this process for good. Raises `LookupError` where the product has no such line any more."""
        for function, changes in self.by_function():
            edited(function, *changes)

    def check(self) -> None:
        """Raises `LookupError` where the product has no such line any more; changes nothing."""
        for function, changes in self.by_function():
            changed_source(function, *changes)

    def by_function(self) -> Iterator[tuple[Any, list[tuple[str, str]]]]:
        for function in dict.fromkeys(function for function, _, _ in self.edits):
            yield function, [(old, new) for edit, old, new in self.edits if edit is function]


def breaks(
    name: str,
    point: int,
    scene: str,
    *edits: tuple[Any, str, str],
    judge: str = "",
    seed: int = 0,
    tests: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Enters a mutant."""
    assert name not in MUTANTS, name
    MUTANTS[name] = Mutant(name, point, scene, edits, judge, seed, options, tests)
