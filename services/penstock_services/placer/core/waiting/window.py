"""Batch window: while jobs arrive fast the waiting ones are left to a batch plan, for a bounded time.

The rate is the placer's own: `batch_arrivals` jobs within `batch_window_ms` are fast. A burst may need more
than the cell has: under a profile with a batch stage the end of a task opens a window, too, while the first
`batch_arrivals` of the queue are of one burst, unless no plan came for the latest. Under a profile with a
regroup stage every arrival opens one, and every end of an attempt while a job waits, except that of a job
which makes way for the plan: the plan decides which jobs run. The window ends when a plan was answered, with
any result, and by a timer where none came; then all jobs are tried as usual. It counts as over at that time
of the ledger, also before the timer's record.
"""

from collections.abc import Iterator

from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened
from penstock.model.schema.event import Event
from penstock_services.placer.core.common import timer

WINDOW = timer_id("cell", "batch_window")
"""The timer at which it is over."""


def arrived(state: CellState, *, regroups: bool) -> Iterator[Event]:
    """A job has just queued: opens a window if that was fast and none is open. `regroups`: the profile has a
    regroup stage, so each one opens it."""
    settings = state.settings
    if not settings.batch_window_ms or state.window_until_ms:
        return
    times = state.arrivals
    fast = len(times) >= settings.batch_arrivals and state.now_ms - times[0] <= settings.batch_window_ms
    if regroups or fast:
        yield from _opened(state)


def freed(state: CellState) -> Iterator[Event]:
    """An attempt is over under a profile with a regroup stage: its resources are left to the plan, if a job
    waits for it."""
    if state.settings.batch_window_ms and not state.window_until_ms and state.queue and not state.frozen:
        yield from _opened(state)


def freed_in_burst(state: CellState) -> Iterator[Event]:
    """A task is over under a profile with a batch stage: its gang's resources are left to the plan, if a
    burst waits. O(`batch_arrivals`)."""
    if state.settings.batch_window_ms and not state.window_until_ms and _burst_waits(state):
        yield from freed(state)


def _burst_waits(state: CellState) -> bool:
    """Whether the first `batch_arrivals` waiting jobs came fast. `arrivals` is short after a window in which
    no plan came."""
    settings = state.settings
    if min(len(state.arrivals), len(state.queue)) < settings.batch_arrivals:
        return False
    first, last = (state.jobs[state.queue.peekitem(at)[1]] for at in (0, settings.batch_arrivals - 1))
    return last.submitted_ms - first.submitted_ms <= settings.batch_window_ms


def _opened(state: CellState) -> Iterator[Event]:
    settings = state.settings
    yield BatchWindowOpened(until_ms=state.now_ms + settings.batch_window_ms)
    yield timer(state, "cell", "batch_window", settings.batch_window_ms)


def over(state: CellState) -> Iterator[Event]:
    """Its timer has fired."""
    if state.window_until_ms:
        yield BatchWindowClosed(reason="over")
