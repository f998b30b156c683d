"""What the contention-guard changes in Faust, without Kafka."""

import asyncio
from collections.abc import Set

import faust
from faust.types import TP

from penstock_services.contention_guard.shell.faust_table import Transport

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
    """The last record of the changelog was read, and the next ones asked for: an empty set would ask for those of all partitions."""
    app = faust.App("pause", env={}, broker="kafka://127.0.0.1:1", loop=asyncio.get_running_loop())
    app.transport = Transport(app.conf.broker_consumer, app)
    consumer, thread = app.consumer, SlowThread()
    consumer._thread = thread
    consumer.resume_partitions({ONE})
    reading = asyncio.ensure_future(anext(consumer.getmany(timeout=1.0), None))  # type: ignore[attr-defined]
    while not consumer.not_waiting_next_records.is_set():  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.pause_partitions({ONE})
    await reading
    assert thread.asked == {ONE}
