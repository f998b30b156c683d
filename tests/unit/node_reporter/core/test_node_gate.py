"""The gate of a task that launches while another one has its GPUs, in the node's core: who launches, when it
opens, and what is reported."""

from collections.abc import Iterator

import pytest

from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import TaskExited, TaskStarted
from penstock_services.node_reporter.core.actions import Emit, OpenGate, Spawn
from penstock_services.node_reporter.core.inputs import Gone, Outcome, Resumed, Spawned
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import Status, check
from tests.unit.node_reporter.core.test_node_core import World, start, stop


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    check(world.state)


def gated(world: World, order: StartTask) -> bool:
    return world.state.tasks[order.task_id].gated


def opened(world: World) -> list[tuple[str, int]]:
    return [(act.task_id, act.token) for act in world.done if isinstance(act, OpenGate)]


def test_it_launches_beside_and_starts_after(world: World) -> None:
    """Its process runs while its predecessor saves. That it has started is reported with the end before it,
    and repeated like any start."""
    first, second = start(5), start(6, prelaunch=True)
    world.run(first)
    world.run(second)
    assert world.spawned == [(first.task_id, 5), (second.task_id, 6)]
    assert gated(world, second)
    assert world.reported() == []
    world.feed(second)
    assert world.reported() == [], "it has not started yet"
    world.feed(Gone(first.task_id, 5, Outcome(9_000, exit_code=0)))
    exited, started = world.reported()
    assert isinstance(exited, TaskExited)
    assert isinstance(started, TaskStarted)
    assert (started.task_id, started.started_ms, started.opened_ms) == (second.task_id, 1_001, 9_000)
    assert opened(world) == [(second.task_id, 6)]
    world.feed(second)
    assert world.reported() == [started]


def test_its_gate_may_open_before_its_program_runs(world: World) -> None:
    """The shim has its request, with a closed gate, and its predecessor ends meanwhile: the gate is opened
    once there is a shim to open it."""
    first, second = start(5), start(6, prelaunch=True)
    world.run(first)
    world.feed(second)
    world.feed(Gone(first.task_id, 5, Outcome(9_000, exit_code=0)))
    assert opened(world) == []
    world.feed(Spawned(second.task_id, 6, 43, 9_100, 9_100))
    assert opened(world) == [(second.task_id, 6)]
    [started] = world.reported()
    assert isinstance(started, TaskStarted)


def test_it_waits_for_all_that_have_its_gpus(world: World) -> None:
    first, second = start(5, gpus=(0,)), start(6, gpus=(1,))
    third = start(7, gpus=(0, 1), prelaunch=True)
    world.run(first)
    world.run(second)
    world.run(third)
    world.feed(Gone(second.task_id, 6, Outcome(9_000, exit_code=0)))
    assert gated(world, third)
    world.feed(Gone(first.task_id, 5, Outcome(9_500, exit_code=0)))
    assert world.state.tasks[third.task_id].opened_ms == 9_500


def test_one_launches_on_a_gpu_and_the_next_waits_for_it(world: World) -> None:
    """Though it could launch as well: it has no process before both before it have ended."""
    first, second, third = start(5), start(6, prelaunch=True), start(7, prelaunch=True)
    world.run(first)
    world.run(second)
    world.feed(third)
    assert world.state.tasks[third.task_id].status is Status.WAITING
    world.feed(Gone(first.task_id, 5, Outcome(9_000, exit_code=0)))
    assert world.state.tasks[third.task_id].status is Status.WAITING
    assert opened(world) == [(second.task_id, 6)]
    world.feed(Gone(second.task_id, 6, Outcome(9_900, exit_code=0)))
    assert (third.task_id, 7) in world.spawned
    assert not gated(world, third)


def test_one_that_is_stopped_at_its_gate_has_never_started(world: World) -> None:
    """It gives its place up; the end of its predecessor opens nothing, and who comes next starts when both
    have ended."""
    first, second, third = start(5), start(6, prelaunch=True), start(8)
    world.run(first)
    world.run(second)
    world.feed(stop(7, second.task_id))
    world.feed(third)
    world.feed(Gone(first.task_id, 5, Outcome(9_000, exit_code=0)))
    assert opened(world) == []
    assert (third.task_id, 8) not in world.spawned
    world.feed(Gone(second.task_id, 6, Outcome(9_100, signal=15)))
    [exited] = world.reported()
    assert isinstance(exited, TaskExited)
    assert exited.cause == "stopped"
    assert (third.task_id, 8) in world.spawned


def test_a_new_reporter_opens_again_what_was_open(world: World) -> None:
    """The one before may have died between the journal and the signal; of those that still wait nothing is
    opened."""
    first, second = start(5, gpus=(0,)), start(6, gpus=(0,), prelaunch=True)
    third, fourth = start(7, gpus=(1,)), start(8, gpus=(1,), prelaunch=True)
    for order in (first, second, third, fourth):
        world.run(order)
    world.feed(Gone(first.task_id, 5, Outcome(9_000, exit_code=0)))
    assert [act for act in step(world.state, Resumed()) if isinstance(act, OpenGate)] == [
        OpenGate(second.task_id, 6)
    ]


def test_an_order_without_it_waits_as_ever(world: World) -> None:
    first, second = start(5), start(6)
    world.run(first)
    decisions = world.feed(second)
    assert not [act for act in decisions if isinstance(act, Spawn | Emit)]
    assert world.state.tasks[second.task_id].status is Status.WAITING
