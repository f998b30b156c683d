"""Patching for mutants: plausible bugs are put into the product's functions at test time, each in its own
process.

A mutant is a function that replaces others: `replace(real, broken)` puts `broken` wherever the product holds
`real` (modules, classes, tables). No source text is matched, so a mutant fits as long as its function exists
with its arguments; else it raises `AttributeError` or `LookupError`, and is an error, not a survivor.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import dedent
from types import MappingProxyType
from typing import Any

from penstock.ledger.state.state import CellState

Function = Callable[..., Any]
MUTANTS: dict[str, Callable[[], None]] = {}
"""By what each breaks, in words."""
SCENARIOS: dict[str, dict[str, Any]] = {}
"""Fields of a run's options in which a mutant shows early; see `mutant`."""
FIRST_SEEDS: dict[str, int] = {}
"""The seed to begin a directed hunt with."""
PACKAGES = ("penstock", "penstock_papers", "penstock_services", "tests")


def mutant(
    name: str, faults: str = "", *, first: int = 0, **options: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enters a function that puts one bug into this process.

    `faults` (comma-separated) and `options` direct its runs: a bug that shows under one kind of fault only is
    found in one or two runs with that kind, and in twenty with all kinds. `first`: for one that shows in few
    runs even so, a seed in which it did; where it does not any more, the hunt goes on from seed 0 and only
    takes longer.
    """

    def enter(put_in: Callable[[], None]) -> Callable[[], None]:
        assert name not in MUTANTS, name
        MUTANTS[name] = put_in
        FIRST_SEEDS[name] = first
        SCENARIOS[name] = options | ({"faults": tuple(faults.split(","))} if faults else {})
        return put_in

    return enter


def replace(real: Function, broken: Function) -> None:
    """Puts `broken` wherever a module, a class or a table holds `real`. Raises `LookupError` if nobody does,
    or if it does not take the same arguments."""
    if inspect.isfunction(real) and inspect.isfunction(broken):
        _demand_same_arguments(real, broken)
    places = 0
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] in PACKAGES]:
        for name, found in list(vars(module).items()):
            if found is real:
                setattr(module, name, broken)
                places += 1
            elif isinstance(found, Mapping) and any(entry is real for entry in found.values()):
                table = {key: broken if entry is real else entry for key, entry in found.items()}
                setattr(module, name, MappingProxyType(table))
                places += 1
            elif isinstance(found, type) and found.__module__ == module.__name__:
                places += _replace_in(found, real, broken)
    if not places:
        raise LookupError(f"{real} is nowhere")


def _demand_same_arguments(real: Function, broken: Function) -> None:
    taken = inspect.signature(real)
    parameters = taken.parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return  # another mutant's
    given = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    named = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(broken).bind(*given, **named)
    except TypeError as error:
        raise LookupError(f"{real.__qualname__} has other arguments now ({taken}): {error}") from None


def _replace_in(owner: type, real: Function, broken: Function) -> int:
    places = 0
    for name, found in list(vars(owner).items()):
        if found is real:
            setattr(owner, name, broken)
            places += 1
    return places


def edited(real: Any, *changes: tuple[str, str]) -> None:
    """A function or a property with pieces of its source changed. Raises `LookupError` unless each piece
    occurs exactly once."""
    replace(real, changed_source(real, *changes))


def changed_source(real: Any, *changes: tuple[str, str]) -> Any:
    """As `edited`, and puts it nowhere."""
    outer: Any = real.fget if isinstance(real, property) else real
    function = inspect.unwrap(outer)
    source = inspect.getsource(function)
    for old, new in changes:
        if source.count(old) != 1:
            raise LookupError(f"{function.__qualname__} has {old!r} {source.count(old)} times")
        source = source.replace(old, new)
    found: dict[str, Any] = {}
    code = compile(dedent(source), f"<mutant of {function.__qualname__}>", "exec")
    exec(code, function.__globals__, found)
    return found[function.__name__]


def filtered(real: Function, keep: Callable[[Any], bool]) -> None:
    """A generator of decisions that leaves some out."""

    def broken(*given: Any, **named: Any) -> Iterator[Any]:
        return (found for found in real(*given, **named) if keep(found))

    replace(real, broken)


def cut_before(real: Function, ends: Callable[[Any], bool]) -> None:
    """A generator of decisions that ends before the first of these."""

    def broken(*given: Any, **named: Any) -> Iterator[Any]:
        for found in real(*given, **named):
            if ends(found):
                return
            yield found

    replace(real, broken)


def nothing(real: Function) -> None:
    """A generator that decides nothing."""
    replace(real, lambda *given, **named: iter(()))


def accepting(real: Function, reason: str) -> None:
    """A guard that does not refuse for this reason."""

    def broken(state: CellState, event: Any) -> str | None:
        found = real(state, event)
        return None if found == reason else found

    replace(real, broken)


@contextmanager
def posing(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute looks different for a while."""
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)
