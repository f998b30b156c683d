"""Stories of groups on their node: a task starts beside a living one on the same GPUs iff the ledger says
that both are of one group."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from penstock.model.decisions.orders import Companion, StartTask
from penstock.model.inputs.external_events import OrderRefused, TaskExited
from penstock_services.node_reporter.core.gpu_shares import promised_mib
from penstock_services.node_reporter.core.inputs import Gone, OrderRead, Outcome, Spawned
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState, Put, Status, Task, check, evolve
from tests.unit.node_reporter.core.test_node_core import World, named, start


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    check(world.state)


def beside(token: int, *companions: StartTask, **more: Any) -> StartTask:
    known = tuple(Companion(task_id=order.task_id, token=order.token) for order in companions)
    return start(token, (0, 1), companions=known, **more)


def ended(order: StartTask) -> Gone:
    return Gone(order.task_id, order.token, Outcome(exited_ms=2_000, exit_code=0))


def test_a_companion_starts_beside_a_living_task_which_hears_nothing(world: World) -> None:
    """`t5` runs on two GPUs; the ledger has made `t9` a member of its group."""
    first = start(5, (0, 1))
    world.run(first)
    decisions = world.feed(beside(9, first))
    assert [type(decision).__name__ for decision in decisions] == ["Put", "Spawn"]
    assert world.spawned == [("t5", 5), ("t9", 9)]


def test_a_stranger_waits_for_all_of_a_group(world: World) -> None:
    """LAW 4 as before: whoever is no companion of each that lives there waits for its end."""
    first = start(5, (0, 1))
    second = beside(9, first)
    world.run(first)
    world.run(second)
    world.feed(start(12, (1,)))
    assert world.state.tasks["t12"].status is Status.WAITING
    world.feed(ended(first))
    assert world.state.tasks["t12"].status is Status.WAITING
    world.feed(ended(second))
    assert world.spawned[-1] == ("t12", 12)


def test_a_companion_waits_for_a_predecessor_outside_its_group(world: World) -> None:
    """`t5` is still being killed; `t8` and `t9` of one record get its GPUs together once it is dead."""
    old = start(5, (0, 1))
    world.run(old)
    one = beside(8, start(8, task_id="other"), task_id="one")
    other = beside(8, one, task_id="other")
    world.feed(one)
    world.feed(other)
    assert [world.state.tasks[name].status for name in ("one", "other")] == [Status.WAITING] * 2
    world.feed(ended(old))
    assert world.spawned[1:] == [("one", 8), ("other", 8)]


def test_another_attempt_of_a_companion_is_a_stranger(world: World) -> None:
    """A companion is named with the token of its start: one that has been started anew meanwhile is not
    meant."""
    world.run(start(7, (0, 1), task_id="t"))
    world.feed(beside(9, start(5, (0, 1), task_id="t")))
    assert world.state.tasks["t9"].status is Status.WAITING


def test_a_stale_order_starts_nothing_though_its_companions_live(world: World) -> None:
    """The order of `t9` comes late: `t12` has joined meanwhile, and a newer decision was obeyed on these
    GPUs."""
    first = start(5, (0, 1))
    world.run(first)
    world.run(beside(12, first))
    world.feed(beside(9, first))
    [refused] = world.reported()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.highest_token) == ("stale_token", 12)


def test_companions_are_known_after_a_restart_of_the_reporter(world: World) -> None:
    """The journal has the orders: the third member starts beside both, a stranger does not."""
    first = start(5, (0, 1))
    second = beside(9, first)
    world.run(first)
    world.run(second)
    again = NodeState("n1", "boot", named((0, 1, 2, 3)))
    for task in world.state.tasks.values():
        evolve(again, Put(msgspec.json.decode(msgspec.json.encode(task), type=Task)))
    check(again)
    step(again, OrderRead(beside(11, first, second), 3_000))
    assert again.tasks["t11"].status is Status.STARTING
    step(again, OrderRead(start(12, (0,)), 3_000))
    assert again.tasks["t12"].status is Status.WAITING
    check(again)


def promising(order: StartTask, memory_mib: int) -> StartTask:
    return msgspec.structs.replace(
        order, place=msgspec.structs.replace(order.place, gpu_memory_mib=memory_mib)
    )


def test_memory_of_members_is_limited_while_a_companion_runs(world: World) -> None:
    """`t5` trains alone and may have its GPUs' memory; `t9` joins, and both are held to what was promised.
    When `t5` is proven dead, `t9` has the GPUs alone."""
    first = promising(start(5, (0, 1)), 4_096)
    second = promising(beside(9, first), 8_192)

    def promised() -> tuple[int, int]:
        return promised_mib(world.state, "t5", 5), promised_mib(world.state, "t9", 9)

    assert (first.gpu_memory_limit_mib, second.gpu_memory_limit_mib) == (0, 8_192), "as their programs start"
    world.run(first)
    world.run(promising(start(6, (2,)), 4_096))
    assert promised() == (0, 0), "a task on other GPUs is none of its companions"
    world.feed(second)
    assert promised() == (0, 8_192), "the program of `t9` does not run yet"
    world.feed(Spawned("t9", 9, 43, 1_001, 1_001))
    assert promised() == (4_096, 8_192)
    assert promised_mib(world.state, "t5", 4) == 0, "another start of the same task"
    world.feed(ended(first))
    assert promised() == (0, 0)


def test_a_job_that_waits_for_a_members_gpus_limits_nobody(world: World) -> None:
    """The next job launches at its gate while `t5` still has the GPUs: it uses none yet."""
    first = promising(start(5, (0, 1)), 4_096)
    world.run(first)
    world.run(promising(start(9, (0, 1), prelaunch=True), 8_192))
    assert world.state.tasks["t9"].gated
    assert (promised_mib(world.state, "t5", 5), promised_mib(world.state, "t9", 9)) == (0, 0)


def test_the_report_of_a_member_that_ran_out_has_its_limit(world: World) -> None:
    first = promising(start(5, (0, 1)), 4_096)
    world.run(first)
    outcome = Outcome(
        exited_ms=2_000, signal=9, exhausted="gpu_memory", evidence="stopped", gpu_memory_limit_mib=4_096
    )
    world.feed(Gone("t5", 5, outcome))
    [exited] = world.reported()
    assert isinstance(exited, TaskExited)
    assert (exited.exhausted, exited.gpu_memory_limit_mib) == ("gpu_memory", 4_096)
