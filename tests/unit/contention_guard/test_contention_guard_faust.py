"""What the contention-guard changes in Faust, without Kafka."""

import asyncio
from collections.abc import Set

import faust
from faust.types import TP
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.following.telemetry import Sampled
from penstock.scheduling.acting.telemetry_windows import CAME_BACK_MS, HELD_WINDOWS, WINDOW_MS, NodeWindow
from penstock_services.contention_guard.shell.faust_table import Transport, _Places
from penstock_services.contention_guard.shell.windows import Held
from tests.support.node_reporter.telemetry import sample

ONE = TP("one", 0)


class SlowThread:
    """Stands for the consumer's thread, which comes to a request after other work."""

    def __init__(self) -> None:
        self.asked: Set[TP] = frozenset()

    async def getmany(self, active: Set[TP], timeout: float) -> dict[TP, list[object]]:
        await asyncio.sleep(0)
        self.asked = frozenset(active)
        return {}


async def test_a_pause_does_not_change_what_was_asked_for() -> None:
    """The last record of the changelog was read, and the next ones asked for: an empty set would ask for
    those of all partitions."""
    app = faust.App("pause", env={}, broker="kafka://127.0.0.1:1", loop=asyncio.get_running_loop())
    app.transport = Transport(app.conf.broker_consumer, app)
    consumer, thread = app.consumer, SlowThread()
    consumer._thread = thread
    consumer.resume_partitions({ONE})
    read = consumer.getmany(timeout=1.0)  # clock: the thread is played and reads none
    reading = asyncio.ensure_future(anext(read, None))
    while not consumer.not_waiting_next_records.is_set():  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.pause_partitions({ONE})
    await reading
    assert thread.asked == {ONE}


@given(st.lists(st.integers(0, 2 * CAME_BACK_MS // WINDOW_MS), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_table_has_all_windows_that_are_held(begins: list[int]) -> None:
    """Samples come late, and the log's clock is ahead and comes back: each window that is held is in the slot
    to which it was written, so that a rebuild finds it."""
    held, places, table = Held(), _Places(), dict[int, NodeWindow]()
    for number, begin in enumerate(begins):
        window = held.add(Sampled(f"s{number}", begin * WINDOW_MS, sample(step_ms=1.0 + number)))
        if window is not None:
            table[places.of(window, held.begins(window.node_id))] = window
    assert table.keys() <= set(range(HELD_WINDOWS))
    stored = {window.begin_ms: window for window in table.values()}
    assert len(stored) == len(table)
    assert all(stored[window.begin_ms] == window for window in held.all())
