"""Tumbling windows of telemetry per node, which the contention-guard reads instead of single samples.

A window merges the samples of one node whose time falls into it. Merging is idempotent, commutative and
associative, so samples that are delivered twice, late or in another order give the same window (at-least-once
delivery): the maximum of pressure values, and the latest of speed values, where the latest is the one with
the greatest (time, event id).
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.model.inputs.external_events import TelemetrySampled

WINDOW_MS = 2_000
"""Length of a window, equal to the kernel's windows of pressure stall information."""
HELD_WINDOWS = 8
"""Per node, the latest ones; samples of older windows come too late and are left out. A node without news has
no new window, so these may be of any age."""
CAME_BACK_MS = 60_000
"""A window that begins more than this before the latest one of its node is not late: the log's clock was
ahead, and came back. Long enough for samples that are read again after a kill: positions are committed every
two seconds."""
MAX_TASKS = 256
"""Maximum number of tasks in one window; beyond it samples of the tasks with the greatest ids are dropped."""


class Latest(NamedTuple):
    """The latest value of a metric, and its sample."""

    at_ms: int
    event_id: str
    value: float


class TaskWindow(NamedTuple):
    """Samples of one task within a window."""

    step_ms: Latest | None = None
    """Mean time of an iteration."""
    gpu_utilisation_percent: Latest | None = None
    cpu_stalled_percent: float | None = None
    """Maximum, 0 – 100."""
    memory_bandwidth_percent: float | None = None
    """Maximum, in percent of the node's bandwidth."""


class NodeWindow(NamedTuple):
    """One window of one node."""

    node_id: str
    begin_ms: int
    """A multiple of `WINDOW_MS`, in the log's time."""
    cpu_stalled_percent: float | None = None
    """Of the node as a whole, maximum."""
    memory_bandwidth_percent: float | None = None
    """Of the node as a whole, maximum."""
    tasks: Mapping[str, TaskWindow] = MappingProxyType({})
    """Task id → window."""


def window_of(at_ms: int) -> int:
    """Begin of the window into which this time falls. `at_ms`: time at which the log took the sample, ≥ 0."""
    return at_ms - at_ms % WINDOW_MS


def clock_came_back(latest_ms: int, begin_ms: int) -> bool:
    """Whether a window that begins at `begin_ms` shows that the log's clock was ahead, where the latest
    window of its node begins at `latest_ms`."""
    return latest_ms - begin_ms > CAME_BACK_MS


def held_with(held: Collection[int], begin_ms: int) -> set[int]:
    """Begins of a node's windows that are held once a sample falls into the one at `begin_ms`: the latest
    ones, at most `HELD_WINDOWS`, without those of a clock that was ahead. `begin_ms` is not among them where
    the sample comes too late."""
    came_back = clock_came_back(max(held, default=begin_ms), begin_ms)
    found = {each for each in held if each <= begin_ms} if came_back else set(held)
    found.add(begin_ms)
    if len(found) > HELD_WINDOWS:
        found.remove(min(found))
    return found


def matters(sample: TelemetrySampled) -> bool:
    """Whether the sample has any metric of a window; losses and memory are not among them."""
    return any(
        value is not None
        for value in (
            sample.step_ms,
            sample.gpu_utilisation_percent,
            sample.cpu_stalled_percent,
            sample.memory_bandwidth_percent,
        )
    )


def merged(window: NodeWindow, event_id: str, at_ms: int, sample: TelemetrySampled) -> NodeWindow:
    """The window with this sample, which belongs to its node and time. O(tasks of the node)."""
    if sample.task_id is None:
        return window._replace(
            cpu_stalled_percent=_greater(window.cpu_stalled_percent, sample.cpu_stalled_percent),
            memory_bandwidth_percent=_greater(
                window.memory_bandwidth_percent, sample.memory_bandwidth_percent
            ),
        )
    task = window.tasks.get(sample.task_id, TaskWindow())
    task = TaskWindow(
        step_ms=_later(task.step_ms, at_ms, event_id, sample.step_ms),
        gpu_utilisation_percent=_later(
            task.gpu_utilisation_percent, at_ms, event_id, sample.gpu_utilisation_percent
        ),
        cpu_stalled_percent=_greater(task.cpu_stalled_percent, sample.cpu_stalled_percent),
        memory_bandwidth_percent=_greater(task.memory_bandwidth_percent, sample.memory_bandwidth_percent),
    )
    tasks = {**window.tasks, sample.task_id: task}
    if len(tasks) > MAX_TASKS:
        del tasks[max(tasks)]
    return window._replace(tasks=tasks)


def _greater(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _later(known: Latest | None, at_ms: int, event_id: str, value: float | None) -> Latest | None:
    if value is None:
        return known
    found = Latest(at_ms, event_id, value)
    return found if known is None else max(known, found)
