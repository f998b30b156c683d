"""Batch window: while jobs arrive fast those that wait are left to a batch plan, for a bounded time.

The rate is the placer's own: `batch_arrivals` jobs within `batch_window_ms` are fast. The window ends when a plan was answered, whatever
became of it, and by a timer where none came; then everybody is tried as usual. It counts as over at that moment of the ledger's time, also
before the timer's record.
"""

from collections.abc import Iterator

from penstock.ledger.state import CellState
from penstock.ledger.timers import timer_id
from penstock.model.event import Event
from penstock.model.plans import BatchWindowClosed, BatchWindowOpened
from penstock_services.placer.core.common import continuation, timer

WINDOW = timer_id("cell", "batch_window")
"""The timer at which it is over."""


def arrived(state: CellState) -> Iterator[Event]:
    """A job has just queued: opens a window if that was fast and none is open."""
    settings = state.settings
    if not settings.batch_window_ms or state.window_until_ms:
        return
    times = state.arrivals
    if len(times) >= settings.batch_arrivals and state.now_ms - times[0] <= settings.batch_window_ms:
        yield BatchWindowOpened(until_ms=state.now_ms + settings.batch_window_ms)
        yield timer(state, "cell", "batch_window", settings.batch_window_ms)


def answered(state: CellState) -> Iterator[Event]:
    """A plan was answered: who still waits is tried at once."""
    if state.window_until_ms:
        yield BatchWindowClosed(reason="answered")
        yield continuation(state)


def over(state: CellState) -> Iterator[Event]:
    """Its timer has fired."""
    if state.window_until_ms:
        yield BatchWindowClosed(reason="over")
