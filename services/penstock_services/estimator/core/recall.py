"""What running jobs told before a snapshot that a fold begins with: a snapshot knows where they run, not how far they are.

Records before the snapshot cannot be judged from their start, whose head nobody knows, but from their end: the snapshot's
head names the last valid one, which names the one before it (LAW 3).
"""

from typing import NamedTuple

from penstock.ledger.record import RawFact, Unreadable, read, record_id
from penstock.model import external_events
from penstock.model.event import wire_type

MAX_RECALLED = 100_000  # records; about two seconds, and at a cell's busiest the last hour
TELLING = frozenset(
    wire_type(kind)
    for kind in (
        external_events.TaskStarted,
        external_events.TaskPhaseChanged,
        external_events.StepsMeasured,
        external_events.EtaEstimated,
    )
)


class Recalled(NamedTuple):
    """What one record holds of TELLING."""

    seq: int
    now_ms: int
    event_id: str | None
    facts: tuple[RawFact, ...]


class _Link(NamedTuple):
    own_id: str
    parent: str
    recalled: Recalled | None


class Recall:
    """Takes records in the order of their partition, valid or not."""

    def __init__(self) -> None:
        self._links: list[_Link] = []

    def take(self, value: bytes) -> None:
        """One record."""
        try:
            record = read(value)
        except Unreadable:
            return
        facts = tuple(fact for fact in record.facts if fact.type in TELLING)
        recalled = Recalled(record.seq, record.now_ms, record.cause.event_id, facts) if facts else None
        self._links.append(_Link(record_id(value), record.parent, recalled))

    def until(self, head_id: str) -> list[Recalled]:
        """Of the valid records up to the one of this id, oldest first; those that are void are left out."""
        found: list[Recalled] = []
        wanted = head_id
        for link in reversed(self._links):
            if link.own_id == wanted:
                wanted = link.parent
                if link.recalled is not None:
                    found.append(link.recalled)
        found.reverse()
        return found
