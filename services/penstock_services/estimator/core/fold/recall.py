"""Recovery of running jobs' progress from before a snapshot that a fold begins with: a snapshot has their
placements, not their progress.

Records before the snapshot cannot be validated forwards, since the head of the chain there is unknown, but
backwards: the snapshot's head names the last valid one, which names the one before it (LAW 3).
"""

from collections.abc import Iterable

from penstock.ledger.record.record import RawFact, Unreadable, read, record_id
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated
from penstock.model.schema.event import wire_type
from penstock_services.estimator.core.fold.live import At
from penstock_services.estimator.core.fold.state import State, evolve

MAX_RECALLED = 100_000  # records; about two seconds, and at a cell's busiest the last hour
PROGRESS = frozenset(
    wire_type(kind)
    for kind in (
        external_events.TaskStarted,
        external_events.TaskPhaseChanged,
        external_events.StepsMeasured,
        EtaEstimated,
    )
)


def recall_from(state: State, offset: int) -> int:
    """Offset from which on records before the snapshot, which ends at `offset`,
    hold the progress of running jobs."""
    if state.recall_seq is None:
        return offset
    oldest = state.recall_seq - 1  # a record's offset is at least its seq - 1: void ones stand between
    return min(max(oldest, offset - MAX_RECALLED, 0), offset)


def recall(state: State, values: Iterable[bytes]) -> None:
    """Folds the progress of the snapshot's running jobs from the records before it, in their order, void ones
    included; only between `begin_at` and the first `fold`."""
    records: list[tuple[str, str, At, list[RawFact]]] = []
    for value in values:
        try:
            record = read(value)
        except Unreadable:
            continue
        at = At(record.seq, record.now_ms, record.cause.event_id)
        facts = [fact for fact in record.facts if fact.type in PROGRESS]
        records.append((record_id(value), record.parent, at, facts))
    valid: list[tuple[At, list[RawFact]]] = []
    wanted = state.head.id
    for own_id, parent, at, facts in reversed(records):
        if own_id == wanted:
            wanted = parent
            valid.append((at, facts))
    for at, facts in reversed(valid):
        for fact in facts:
            evolve(state, at, fact.type, fact.event())
