"""The windows that the contention-guard reads: merged from the telemetry topic, on the log in memory."""

import asyncio

import pytest

from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.runtime.following.telemetry import Sampled
from penstock.scheduling.acting.telemetry_windows import HELD_WINDOWS, WINDOW_MS, NodeWindow, window_of
from penstock_services.contention_guard.shell.windows import Held, LogWindows
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.telemetry import message, sample


@pytest.fixture
def broker() -> MemoryBroker:
    found = MemoryBroker()
    found.create(topic_partitions())
    return found


def send(broker: MemoryBroker, event_id: str, event: TelemetrySampled, value: bytes | None = None) -> None:
    broker.append("node-reporter", [message(event_id, event, value)])


async def test_history_comes_first_then_each_change_at_once(broker: MemoryBroker) -> None:
    """A guard starts on a cell that has run for a while: it gets what its nodes have sent, then what they
    send."""
    send(broker, "s1", sample(step_ms=100.0))
    send(broker, "s2", sample("n2", None, memory_bandwidth_percent=80.0))
    send(broker, "s3", sample(loss=0.5))  # nothing that a window holds
    windows = LogWindows(MemoryLog(broker))
    try:
        found = {window.node_id: window for window in await windows.begin()}
        assert found["n1"].tasks["a.1.w0"].step_ms is not None
        assert found["n2"].memory_bandwidth_percent == 80.0
        reading = asyncio.ensure_future(windows.read())
        await asyncio.sleep(0)
        assert not reading.done()
        send(broker, "s4", sample(step_ms=120.0))
        (changed,) = await reading
        step = changed.tasks["a.1.w0"].step_ms
        assert step is not None
        assert (step.event_id, step.value) == ("s4", 120.0)
        assert changed.begin_ms == window_of(step.at_ms)
    finally:
        await windows.close()


async def test_what_cannot_be_read_is_reported_and_passed_over(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    send(broker, "s1", sample(step_ms=100.0), value=b'{"step_ms": NaN}')
    send(broker, "s2", sample(step_ms=100.0), value=b"\xff")
    send(broker, "s3", sample("n2", step_ms=5.0))
    windows = LogWindows(MemoryLog(broker))
    try:
        assert [window.node_id for window in await windows.begin()] == ["n2"]
        assert caplog.text.count("WARNING") == 2
    finally:
        await windows.close()


def test_after_a_clock_was_ahead_the_windows_are_those_of_the_present() -> None:
    """The log's clock is ahead by an hour for as long as it takes to fill all windows of a node. When it is
    right again, the first sample is in a window, and samples that are read again after a kill change
    nothing."""
    ahead_ms, present = 3_600_000, 20 * WINDOW_MS
    times = [*range(0, present, WINDOW_MS)]
    times += [ahead_ms + at_ms for at_ms in range(present, 2 * present, WINDOW_MS)]
    times += [*range(2 * present, 2 * present + 3 * WINDOW_MS, WINDOW_MS)]
    samples = [Sampled(f"s{number}", at_ms, sample(step_ms=100.0)) for number, at_ms in enumerate(times)]
    held = Held()
    for one in samples[:-3]:
        held.add(one)
    for one in samples[-3:]:
        assert held.add(one) is not None
    expected = held.all()
    assert [window.begin_ms for window in expected] == times[-3:]
    for one in samples[-10:]:
        held.add(one)
    assert held.all() == expected


def test_a_sample_that_comes_twice_or_too_late_changes_nothing() -> None:
    """A node resends after an outage what the log already has, and what was sent long ago."""
    held = Held()
    one = Sampled("s0", 0, sample(step_ms=100.0))
    assert held.add(one) is not None
    assert held.add(one) is None
    for number in range(1, HELD_WINDOWS + 1):
        held.add(Sampled(f"s{number}", number * WINDOW_MS, sample(step_ms=100.0)))
    assert held.add(Sampled("late", 1, sample(step_ms=50.0))) is None
    assert [window.begin_ms for window in held.all()] == [
        number * WINDOW_MS for number in range(1, HELD_WINDOWS + 1)
    ]
    assert isinstance(held.all()[0], NodeWindow)
