"""The node's choices about cores and memory bandwidth, without a process: orders in, exact changes and
actions out."""

from typing import Any

import msgspec

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import SetBandwidth, SetCores, StartTask
from penstock.model.nouns.types import TaskPlacement
from penstock_services.node_reporter.core.actions import CapBandwidth, Emit, Note, SetAffinity, Spawn
from penstock_services.node_reporter.core.inputs import Done, Gone, OrderRead, Outcome, Resumed, Spawned
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState, Put, Task, check

TASK = "t1"


def start(
    token: int = 1, task_id: str = TASK, gpu: str = "GPU-0", cores: tuple[int, ...] = (0, 1)
) -> StartTask:
    place = TaskPlacement(task_id=task_id, role="worker", rank=0, node_id="n1", gpus=(0,), cores=cores)
    return StartTask(
        token=token,
        node_id="n1",
        task_id=task_id,
        job_id="j",
        attempt=1,
        boot_id="boot",
        command=("train",),
        place=place,
        gpu_uuids=(gpu,),
        peers=(),
        rendezvous_port=29_500,
        grace_ms=10,
    )


def cores(token: int, *chosen: int, task_id: str = TASK) -> SetCores:
    return SetCores(token=token, node_id="n1", task_id=task_id, cores=chosen)


def cap(token: int, percent: int | None) -> SetBandwidth:
    return SetBandwidth(token=token, node_id="n1", task_id=TASK, memory_bandwidth_percent=percent)


class World:
    """A node of 8 cores whose journal survives it: what is put is what a restarted reporter finds."""

    def __init__(self) -> None:
        self.state = NodeState("n1", "boot", ("GPU-0", "GPU-1"), cores=8)

    def feed(self, given: Any) -> list[Any]:
        """Actions and reports; changes are folded."""
        if not isinstance(given, Spawned | Gone | Done | Resumed):
            given = OrderRead(given, 1_000)
        found = step(self.state, given)
        check(self.state)
        return [decision for decision in found if not isinstance(decision, Put)]

    def spawned(self) -> list[Any]:
        return self.feed(Spawned(TASK, 1, 42, 1_001, 1_001))

    def restart(self) -> list[Any]:
        """kill -9; the next reporter finds the task running and reads its row from the disk."""
        rows = [
            msgspec.json.decode(msgspec.json.encode(task), type=Task) for task in self.state.tasks.values()
        ]
        self.state = NodeState("n1", "boot", ("GPU-0", "GPU-1"), gpu_tokens=self.state.gpu_tokens, cores=8)
        self.state.tasks = {task.task_id: task for task in rows}
        return self.feed(Resumed())

    def place(self) -> tuple[int, ...]:
        order = self.state.tasks[TASK].order
        assert order is not None
        return order.place.cores


def running() -> World:
    world = World()
    world.feed(start())
    world.spawned()
    return world


def answers(decisions: list[Any]) -> list[tuple[int, str, str]]:
    events = [decision.event for decision in decisions if isinstance(decision, Emit)]
    return [(e.order_token, e.enforced, e.detail) for e in events if isinstance(e, TaskAdjusted)]


def test_an_order_is_on_the_disk_before_it_is_obeyed_and_answered_after() -> None:
    """LAW 4, for what a task has: the shell makes the row durable, then pins, reads back, reports."""
    world = running()
    decisions = step(world.state, OrderRead(cores(3, 2), 1_000))
    assert [type(decision) for decision in decisions] == [Put, SetAffinity]
    assert world.feed(Done(TASK, 1, 3, "cores", "cpuset"))[0].event == TaskAdjusted(
        node_id="n1", task_id=TASK, token=1, order_token=3, what="cores", enforced="cpuset"
    )


def test_an_older_order_never_overwrites_a_newer_one() -> None:
    """A placer that was replaced wakes and sends what it had decided before; the log has it behind the newer
    one."""
    world = running()
    world.feed(cores(5, 4))
    assert [type(decision) for decision in world.feed(cores(4, 6, 7))] == [Note]
    assert world.place() == (4,)
    world.restart()
    assert [type(decision) for decision in world.feed(cores(4, 6, 7))] == [Note]
    assert world.place() == (4,)


def test_after_a_restart_who_gives_up_cores_comes_before_who_gets_them() -> None:
    """A reporter dies over two orders: the younger task has shrunk, the older one has what that left."""
    world = running()
    world.feed(start(2, "t2", "GPU-1", (2, 3)))
    world.feed(Spawned("t2", 2, 43, 1_001, 1_001))
    world.feed(cores(5, 3, task_id="t2"))
    world.feed(cores(6, 0, 1, 2))
    assert world.restart() == [SetAffinity("t2", 2, 5, (3,)), SetAffinity(TASK, 1, 6, (0, 1, 2))]


def test_cores_and_bandwidth_are_two_matters() -> None:
    """An order about one kind that comes late is not older than the latest of the other kind."""
    world = running()
    world.feed(cores(5, 4))
    assert world.feed(cap(4, 40)) == [CapBandwidth(TASK, 1, 4, 40)]
    assert world.feed(Done(TASK, 1, 4, "memory_bandwidth", "", "this node has no resctrl"))
    assert answers(world.feed(cap(4, 40))) == [(4, "", "this node has no resctrl")]


def test_the_same_order_twice_is_done_once_and_answered_twice() -> None:
    """A new placer repeats what it does not know to be answered."""
    world = running()
    assert world.feed(cores(3, 2)) == [SetAffinity(TASK, 1, 3, (2,))]
    assert world.feed(cores(3, 2)) == [
        SetAffinity(TASK, 1, 3, (2,))
    ]  # the first one may not have come to its end
    assert answers(world.feed(Done(TASK, 1, 3, "cores", "affinity"))) == [(3, "affinity", "")]
    assert world.feed(Done(TASK, 1, 3, "cores", "affinity")) == []
    assert answers(world.feed(cores(3, 2))) == [(3, "affinity", "")]


def test_a_result_that_a_newer_order_has_overtaken_is_not_reported() -> None:
    world = running()
    world.feed(cores(3, 2))
    world.feed(cores(4, 5))
    assert world.feed(Done(TASK, 1, 3, "cores", "affinity")) == []
    assert answers(world.feed(Done(TASK, 1, 4, "cores", "affinity"))) == [(4, "affinity", "")]


def test_an_order_for_an_ended_task_changes_nothing() -> None:
    """The exit is on its way to the placer while the order is on its way here."""
    world = running()
    world.feed(Gone(TASK, 1, Outcome(2_000, exit_code=0)))
    assert [type(decision) for decision in world.feed(cores(3, 2))] == [Note]
    assert [type(decision) for decision in world.feed(cap(4, 20))] == [Note]
    assert world.state.tasks == {}


def test_an_end_between_the_order_and_its_result_is_the_last_word() -> None:
    world = running()
    world.feed(cores(3, 2))
    world.feed(Gone(TASK, 1, Outcome(2_000, exit_code=0)))
    assert world.feed(Done(TASK, 1, 3, "cores", "affinity")) == []


def test_cores_that_the_node_does_not_have_are_answered_and_not_set() -> None:
    """A virtual machine was given fewer cores at its last boot, or an order is for another machine of this
    name."""
    world = running()
    assert answers(world.feed(cores(3, 2, 8))) == [(3, "", "not on this node: cores 8; it has 8")]
    assert world.place() == (0, 1)
    assert world.restart() == []


def test_a_task_that_starts_is_adjusted_when_it_runs() -> None:
    """The order comes while its program is about to run, with the cores of the start order."""
    world = World()
    world.feed(start())
    assert world.feed(cores(3, 2)) == []
    found = world.spawned()
    assert [type(decision) for decision in found] == [Emit, SetAffinity]
    assert found[1].cores == (2,)


def test_a_start_that_waits_or_is_repeated_has_the_adjusted_cores() -> None:
    """Its predecessor on the GPU dies slowly. When its turn comes, its order is the newest one."""
    world = World()
    world.feed(start(1, "before"))
    world.feed(start(2, TASK))
    assert world.feed(cores(3, 6)) == []
    world.feed(Spawned("before", 1, 41, 1_001, 1_001))
    [_, spawn] = world.feed(Gone("before", 1, Outcome(2_000, exit_code=0)))
    assert isinstance(spawn, Spawn)
    assert spawn.order.place.cores == (6,)


def test_a_reporter_killed_between_its_journal_and_the_deed_does_it_at_its_next_start() -> None:
    """The row has the order without an answer. What was answered is not done again: the kernel keeps it."""
    world = running()
    world.feed(cores(3, 2))
    world.feed(cap(4, 30))
    assert world.restart() == [SetAffinity(TASK, 1, 3, (2,), 30), CapBandwidth(TASK, 1, 4, 30)]
    world.feed(Done(TASK, 1, 3, "cores", "affinity"))
    assert world.restart() == [CapBandwidth(TASK, 1, 4, 30)]


def test_room_is_made_before_it_is_used() -> None:
    """One read brings the order to shrink and the start that gets the room: the threads move before the
    program runs."""
    world = running()
    acts = [act for order in (cores(3, 0), start(4, "next", "GPU-1", (1,))) for act in world.feed(order)]
    assert [type(act) for act in acts] == [SetAffinity, Spawn]


def test_a_row_of_an_earlier_version_is_read() -> None:
    """The journal of a reporter without adjustments."""
    row = b'{"task_id":"t","token":3,"boot_id":"b","status":"running"}'
    task = msgspec.json.decode(row, type=Task)
    assert (task.cores, task.bandwidth) == (None, None)
