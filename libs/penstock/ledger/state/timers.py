"""Timers of a cell: one per subject and kind, in a heap of due times."""

import heapq

from penstock.ledger.state.state import CellState, Timer
from penstock.model.decisions import ledger_events

MIN_TIMER_HEAP = 64  # entries below which compacting is not worthwhile


def timer_id(subject_id: str, kind: str) -> str:
    """Id of the one timer of this subject and kind."""
    return f"{subject_id}:{kind}"


def drop_timers(state: CellState, job_id: str, *kinds: str) -> None:
    """Cancels these timers of a job."""
    timers = state.timers
    for kind in kinds if timers else ():
        timers.pop(f"{job_id}:{kind}", None)


def timer_set(state: CellState, fact: ledger_events.TimerSet) -> None:
    state.timers[fact.timer_id] = Timer(fact.at_ms, fact.about)
    heapq.heappush(state.timer_heap, (fact.at_ms, fact.timer_id))
    compact_timers(state)


def compact_timers(state: CellState) -> None:
    """Removes entries of cancelled timers from the heap, before they are due, once they are most of it.
    Amortised O(log timers)."""
    if len(state.timer_heap) > MIN_TIMER_HEAP and len(state.timer_heap) > 2 * len(state.timers):
        state.timer_heap = [(timer.at_ms, timer_id) for timer_id, timer in state.timers.items()]
        heapq.heapify(state.timer_heap)


def timer_gone(state: CellState, fact: ledger_events.TimerFired) -> None:
    state.timers.pop(fact.timer_id, None)
