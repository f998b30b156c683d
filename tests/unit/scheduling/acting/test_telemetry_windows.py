"""Tumbling windows of telemetry: the same samples give the same window, in whatever order and however often
they come."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.inputs.external_events import TelemetrySampled
from penstock.scheduling.acting.telemetry_windows import (
    MAX_TASKS,
    WINDOW_MS,
    NodeWindow,
    TaskWindow,
    matters,
    merged,
    window_of,
)

SAMPLES = st.builds(
    TelemetrySampled,
    node_id=st.just("a"),
    task_id=st.sampled_from([None, "j.1.w0", "k.1.w0"]),
    at_ms=st.integers(0, 10_000),
    step_ms=st.none() | st.floats(1, 1_000),
    gpu_utilisation_percent=st.none() | st.floats(0, 100),
    cpu_stalled_percent=st.none() | st.floats(0, 100),
    memory_bandwidth_percent=st.none() | st.floats(0, 200),
)


def window(samples: list[tuple[str, int, TelemetrySampled]]) -> NodeWindow:
    found = NodeWindow("a", 0)
    for event_id, at_ms, sample in samples:
        found = merged(found, event_id, at_ms, sample)
    return found


@given(st.lists(st.tuples(st.integers(0, WINDOW_MS - 1), SAMPLES), max_size=12), st.randoms())
def test_redelivered_and_reordered_samples_give_the_same_window(
    taken: list[tuple[int, TelemetrySampled]], shuffle: random.Random
) -> None:
    """A consumer that crashes reads samples again that it had merged; partitions are rebalanced and order is
    lost."""
    once = [(f"e{number}", at_ms, sample) for number, (at_ms, sample) in enumerate(taken)]
    again = [*once, *(one for one in once if shuffle.random() < 0.5)]
    shuffle.shuffle(again)
    assert window(again) == window(once)


def test_what_harms_is_the_maximum_and_what_is_compared_the_latest() -> None:
    early = TelemetrySampled(node_id="a", task_id="j.1.w0", at_ms=1, step_ms=300.0, cpu_stalled_percent=80.0)
    late = TelemetrySampled(node_id="a", task_id="j.1.w0", at_ms=2, step_ms=100.0, cpu_stalled_percent=10.0)
    node = TelemetrySampled(node_id="a", at_ms=3, memory_bandwidth_percent=91.0)
    found = window([("e2", 20, late), ("e1", 10, early), ("e3", 30, node)])
    task = found.tasks["j.1.w0"]
    assert task.step_ms is not None
    assert (task.step_ms.value, task.cpu_stalled_percent) == (100.0, 80.0)
    assert found.memory_bandwidth_percent == 91.0


def test_a_window_is_bounded() -> None:
    """A node that names a new task in every sample fills no memory."""
    samples = [
        (
            f"e{number}",
            number,
            TelemetrySampled(node_id="a", task_id=f"j{number:04}.1.w0", at_ms=0, step_ms=1.0),
        )
        for number in range(MAX_TASKS + 50)
    ]
    one, other = window(samples), window(samples[::-1])
    assert one == other
    assert len(one.tasks) == MAX_TASKS
    assert TaskWindow() not in one.tasks.values()


def test_losses_and_memory_are_no_part_of_a_window() -> None:
    assert not matters(TelemetrySampled(node_id="a", task_id="j.1.w0", at_ms=0, loss=1.0, gpu_memory_mib=5))
    assert matters(TelemetrySampled(node_id="a", at_ms=0, memory_bandwidth_percent=0.0))
    assert window_of(WINDOW_MS - 1) == 0
    assert window_of(WINDOW_MS) == WINDOW_MS
