"""Additions to the facts of ledger records since the first version with this table: what a reader that does
not know them may do.

A writer marks such a fact with `needs`, the lowest version that may fold the record. A reader of that version
or a later one takes the nearest values where the fact's type has any (`penstock.model.wire.nearest`), and
else leaves out a fact that it does not know; an earlier one stops, and says which version is needed. Facts
without a mark have the form that every version with this table knows. Decision 127.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock import __version__
from penstock.model.decisions.distrust import NodeDistrusted, NodePutOnProbation, NodeTrusted
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.types import Value
from penstock.model.schema.event import Event

ANY = "0.1.0"
"""The first version that reads marks: each may go on without knowing a fact that `needs` this one."""


class Addition(NamedTuple):
    """One addition to a type of event.

    `needs`: as in the record. `field`: a path such as `tasks.role`; empty: the type is new. `values`: values
    that are new; empty: all but None, False, 0 and what is empty. `above`: numbers beyond it are new.
    """

    needs: str
    field: str = ""
    values: frozenset[Any] = frozenset()
    above: float | None = None

    def is_in(self, fact: Event) -> bool:
        """Whether the fact has it."""
        if not self.field:
            return True
        return any(self._is_new(value) for value in _at(fact, self.field.split(".")))

    def _is_new(self, value: Any) -> bool:
        if self.above is not None:
            return value is not None and bool(value > self.above)
        return value in self.values if self.values else bool(value)


ADDITIONS: Mapping[type[Event], tuple[Addition, ...]] = MappingProxyType(
    {
        JobCommandRun: (Addition(ANY),),  # changes nothing of the state
        FollowerChanged: (Addition(ANY),),
        SaveRefused: (Addition(ANY),),
        NodeDistrusted: (Addition(ANY),),  # without them a reader shows the node as usable, and folds on
        NodePutOnProbation: (Addition(ANY),),
        NodeTrusted: (Addition(ANY),),
    }
)
"""Type → its additions. `infra.codegen.released` refuses a new type, value or wider bound without a row."""


def needed(fact: Event, additions: Mapping[type[Event], tuple[Addition, ...]] = ADDITIONS) -> str:
    """The mark that the fact has in a record; empty: none."""
    found = [addition.needs for addition in additions.get(type(fact), ()) if addition.is_in(fact)]
    return max(found, key=_release, default="")


def is_newer(version: str) -> bool:
    """Whether this code is of an earlier version than the given one."""
    return is_earlier(__version__, version)


def is_earlier(version: str, other: str) -> bool:
    """Whether the first version is before the other one."""
    return _release(version) < _release(other)


def _release(version: str) -> tuple[int, ...]:
    """`1.2.0rc1` → (1, 2, 0); a text without numbers → ()."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if isinstance(value, tuple):
        for one in value:
            yield from _at(one, path)
    elif not path:
        yield value
    elif isinstance(value, Value):
        yield from _at(getattr(value, path[0]), path[1:])
