"""The node's choices without a process: orders and exits in, exact changes and actions out."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.decisions.orders import Peer, StartTask, StopTask, pack_peers
from penstock.model.inputs.external_events import OrderRefused, TaskExited, TaskStarted
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.actions import (
    Emit,
    KillAt,
    Note,
    Signal,
    Spawn,
)
from penstock_services.node_reporter.core.environment import (
    base_environment,
    gang_of,
    peers_json,
    task_environment,
)
from penstock_services.node_reporter.core.inputs import (
    Drain,
    Gone,
    GraceOver,
    OrderRead,
    Outcome,
    Spawned,
    Unsaved,
)
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import (
    MAX_ENDED_REMEMBERED,
    MAX_GANGS_REMEMBERED,
    Forget,
    NodeState,
    Status,
    check,
)


def named(gpus: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"GPU-{gpu}" for gpu in gpus)


def start(
    token: int, gpus: tuple[int, ...] = (0,), task_id: str = "", share_milli: int = 1_000, **more: Any
) -> StartTask:
    task_id = task_id or f"t{token}"
    place = TaskPlacement(
        task_id=task_id,
        role="worker",
        rank=0,
        node_id="n1",
        gpus=gpus,
        cores=(0, 1),
        gpu_share_milli=share_milli,
    )
    fields: dict[str, Any] = {
        "token": token,
        "node_id": "n1",
        "task_id": task_id,
        "job_id": "j",
        "attempt": 1,
        "boot_id": "boot",
        "command": ("train",),
        "place": place,
        "gpu_uuids": named(gpus),
        "peers": (),
        "rendezvous_port": 29_500,
        "grace_ms": 10,
    }
    return StartTask(**{**fields, **more})


def stop(token: int, task_id: str, grace_ms: int = 100) -> StopTask:
    return StopTask(token=token, node_id="n1", task_id=task_id, grace_ms=grace_ms, reason="cancelled")


class World:
    """A node core whose instructions are recorded, not carried out."""

    def __init__(self) -> None:
        self.state = NodeState("n1", "boot", named((0, 1, 2, 3)))
        self.spawned: list[tuple[str, int]] = []
        self.done: list[Any] = []

    def feed(self, given: Any, now_ms: int = 1_000) -> list[Any]:
        if not isinstance(given, Spawned | Gone | GraceOver | Drain | Unsaved):
            given = OrderRead(given, now_ms)
        self.done = step(self.state, given)
        self.spawned += [(d.order.task_id, d.order.token) for d in self.done if isinstance(d, Spawn)]
        check(self.state)
        return self.done

    def reported(self) -> list[Event]:
        return [decision.event for decision in self.done if isinstance(decision, Emit)]

    def run(self, order: StartTask) -> None:
        self.feed(order)
        self.feed(Spawned(order.task_id, order.token, 42, 1_001, 1_001))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    check(world.state)


def test_a_start_is_written_down_before_it_is_carried_out(world: World) -> None:
    """LAW 4: the token is in the changes, which the shell makes durable before it acts."""
    decisions = world.feed(start(5))
    assert [type(decision).__name__ for decision in decisions] == ["Put", "Spawn"]
    assert world.state.gpu_tokens == {"GPU-0": 5}


def test_the_dispatcher_repeats_itself_after_its_restart(world: World) -> None:
    """The same order again starts nothing; the node repeats its answer."""
    world.run(start(5))
    world.feed(start(5))
    assert [type(event) for event in world.reported()] == [TaskStarted]
    world.feed(Gone("t5", 5, Outcome(2_000, exit_code=0)))
    first = world.reported()
    world.feed(start(5))
    assert world.reported() == first
    assert isinstance(first[0], TaskExited)
    assert world.spawned == [("t5", 5)]


def test_a_large_gangs_second_order_is_obeyed_after_its_first_task_has_ended(world: World) -> None:
    """Its members are done within milliseconds, and the log brings their orders in two pieces."""
    peers = tuple(Peer(rank=rank, role="worker", node_id="n1", address="a") for rank in range(80))
    for number in range(MAX_GANGS_REMEMBERED + 2):
        token, bearer = number + 5, f"g{number}.1.0"
        world.run(start(token, (0,), bearer, peers_of=bearer, packed_peers=pack_peers(peers)))
        world.feed(Gone(bearer, token, Outcome(2_000, exit_code=0)))
    [put, spawn] = world.feed(start(token, (1,), f"g{number}.1.1", peers_of=bearer))
    assert spawn.order.peers == peers
    assert put.task.order == spawn.order
    assert len(world.state.gangs) == MAX_GANGS_REMEMBERED


def test_a_zombies_order_is_refused_by_its_token(world: World) -> None:
    """A placer that was suspended wakes up and sends what it had decided long ago."""
    world.run(start(9))
    world.feed(Gone("t9", 9, Outcome(2_000, exit_code=0)))
    world.feed(start(8))
    (refused,) = world.reported()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.token, refused.highest_token) == ("stale_token", 8, 9)
    assert world.spawned == [("t9", 9)]


def test_a_successor_waits_until_the_predecessor_is_proven_dead(world: World) -> None:
    """The placer pre-schedules a successor; the GPU's process still writes its checkpoint."""
    world.run(start(1))
    world.feed(start(2))
    assert world.spawned == [("t1", 1)]
    world.feed(stop(3, "t1"))
    assert world.spawned == [("t1", 1)], "SIGTERM is no proof"
    world.feed(Gone("t1", 1, Outcome(2_000, signal=15)))
    assert world.spawned == [("t1", 1), ("t2", 2)]


def test_a_newer_decision_supersedes_a_waiting_one(world: World) -> None:
    world.run(start(1))
    world.feed(start(2))
    world.feed(start(3))
    (refused,) = world.reported()
    assert isinstance(refused, OrderRefused)
    assert (refused.task_id, refused.highest_token) == ("t2", 3)
    world.feed(Gone("t1", 1, Outcome(2_000, exit_code=0)))
    assert world.spawned == [("t1", 1), ("t3", 3)]


def test_shares_of_a_gpu_run_side_by_side(world: World) -> None:
    """LAW 4: a task starts beside another one only if both orders share the GPU, and not beyond the whole."""
    world.run(start(1, share_milli=500))
    world.run(start(2, share_milli=300))
    assert world.spawned == [("t1", 1), ("t2", 2)]
    world.feed(start(3, share_milli=400))
    assert world.spawned == [("t1", 1), ("t2", 2)], "only 200 are left"
    world.feed(Gone("t2", 2, Outcome(2_000, exit_code=0)))
    assert world.spawned[2:] == [("t3", 3)]


def test_a_share_waits_for_the_process_that_has_the_gpu_whole(world: World) -> None:
    """The cell gave the GPU to two notebooks; the training job before them still writes its checkpoint."""
    world.run(start(1))
    world.feed(start(2, share_milli=500))
    world.feed(start(3, share_milli=500))
    assert world.reported() == [], "neither notebook supersedes the other"
    world.feed(Gone("t1", 1, Outcome(2_000, exit_code=0)))
    assert world.spawned == [("t1", 1), ("t2", 2), ("t3", 3)]


def test_a_whole_gpu_supersedes_waiting_shares(world: World) -> None:
    """The cell took the notebooks back before they could start: the GPU is a training job's again."""
    world.run(start(1))
    world.feed(start(2, share_milli=500))
    world.feed(start(3))
    (refused,) = world.reported()
    assert isinstance(refused, OrderRefused)
    assert (refused.task_id, refused.highest_token) == ("t2", 3)


def test_a_stop_overtakes_its_start(world: World) -> None:
    """The start order was lost with a broker; the job is cancelled; then the order turns up after all."""
    world.feed(stop(7, "t6"))
    (exited,) = world.reported()
    assert isinstance(exited, TaskExited)
    assert (exited.cause, exited.detail) == ("stopped", "never started")
    world.feed(start(6))
    assert isinstance(world.reported()[0], OrderRefused)
    assert world.spawned == []


def test_a_stop_during_the_launch_takes_effect_at_once_and_once_it_runs(world: World) -> None:
    """Its workdir is on a network that hangs, so it may never run; or it begins just now, and the first
    signal found it too early."""
    world.feed(start(1))
    world.feed(stop(2, "t1", 50), now_ms=1_000)
    assert world.done[1:] == [Signal("t1", 1, signal.SIGTERM), KillAt("t1", 1, 1_050)]
    assert world.feed(GraceOver("t1", 1)) == [Signal("t1", 1, signal.SIGKILL)]
    world.feed(stop(3, "t1", 0), now_ms=1_000)
    world.feed(stop(4, "t1", 50), now_ms=1_000)
    assert KillAt("t1", 1, 1_000) in world.done, "a repeat does not lengthen the grace"
    world.feed(stop(5, "t1", 50), now_ms=1_000)
    world.feed(Spawned("t1", 1, 42, 1_500, 1_500))
    assert Signal("t1", 1, signal.SIGTERM) in world.done
    assert KillAt("t1", 1, 1_500) in world.done
    world.feed(GraceOver("t1", 1))
    assert world.done == [Signal("t1", 1, signal.SIGKILL)]


def test_a_repeated_stop_never_lengthens_the_grace(world: World) -> None:
    world.run(start(1))
    world.feed(stop(2, "t1", 1_000), now_ms=0)
    assert world.feed(stop(3, "t1", 5_000), now_ms=1) == []
    assert KillAt("t1", 1, 12) in world.feed(stop(4, "t1", 10), now_ms=2)


def test_a_waiting_order_can_be_cancelled(world: World) -> None:
    world.run(start(1))
    world.feed(start(2))
    world.feed(stop(3, "t2"))
    assert isinstance(world.reported()[0], TaskExited)
    world.feed(Gone("t1", 1, Outcome(2_000, exit_code=0)))
    assert world.spawned == [("t1", 1)]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (start(5, (9,)), "unknown_gpu"),
        (start(5, (), place=TaskPlacement(task_id="t5", role="worker", rank=0, node_id="n2")), "wrong_node"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_for_good(world: World, order: StartTask, reason: str) -> None:
    """The placer places it elsewhere after the refusal; a repeat must not start it here."""
    world.feed(order)
    (refused,) = world.reported()
    assert isinstance(refused, OrderRefused)
    assert refused.reason == reason
    world.feed(order)
    assert world.reported() == [refused]
    assert world.spawned == []


def test_orders_for_an_older_boot_are_ignored(world: World) -> None:
    assert [type(d) for d in world.feed(start(5, boot_id="old"))] == [Note]
    assert world.state.gpu_tokens == {}


def test_the_tasks_of_a_gang_share_a_token(world: World) -> None:
    world.feed(start(5, (0,), "j.0"))
    world.feed(start(5, (1,), "j.1"))
    assert world.spawned == [("j.0", 5), ("j.1", 5)]


def test_a_forgotten_task_does_not_start_again(world: World) -> None:
    """Memory is bounded; what is older than everything remembered is old, not new."""
    for token in range(1, MAX_ENDED_REMEMBERED + 3):
        world.feed(start(token, gpus=()))
        world.feed(Spawned(f"t{token}", token, 1, 1, 1))
        world.feed(Gone(f"t{token}", token, Outcome(2, exit_code=0)))
    assert any(isinstance(decision, Forget) for decision in world.done)
    spawned = len(world.spawned)
    world.feed(start(1, gpus=()))
    assert isinstance(world.reported()[0], OrderRefused)
    assert len(world.spawned) == spawned


@pytest.mark.parametrize(
    ("outcome", "stopped", "cause"),
    [
        (Outcome(9, exit_code=0), False, "exited"),
        (Outcome(9, exit_code=0), True, "stopped"),
        (Outcome(9, failure="cannot execute"), False, "start_failed"),
        (Outcome(9, signal=9, out_of_memory=True), False, "out_of_memory"),
        (Outcome(9, signal=9, lost="shim killed"), True, "lost"),
    ],
)
def test_the_cause_of_an_exit(world: World, outcome: Outcome, stopped: bool, cause: str) -> None:
    world.run(start(1))
    if stopped:
        world.feed(stop(2, "t1"))
    world.feed(Gone("t1", 1, outcome))
    (exited,) = world.reported()
    assert isinstance(exited, TaskExited)
    assert exited.cause == cause


def test_a_drained_node_stops_everything(world: World) -> None:
    world.run(start(1))
    world.feed(start(2))
    world.feed(Drain(5_000, 70))
    assert Signal("t1", 1, signal.SIGTERM) in world.done
    assert KillAt("t1", 1, 5_070) in world.done
    assert "t2" not in world.state.tasks


# ------------------------------------------------------------------------------------------- properties

_starts = st.builds(
    lambda token, gpus, name, share: start(
        token, tuple(sorted(gpus)), name, share if len(gpus) == 1 else 1_000
    ),
    st.integers(0, 30),
    st.sets(st.integers(0, 4), max_size=3),
    st.sampled_from("abcdef"),
    st.sampled_from([1_000, 700, 500, 300]),
)
_stops = st.builds(stop, st.integers(0, 30), st.sampled_from("abcdef"))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(_starts, _stops, st.sampled_from(["spawned", "gone", "grace"])), max_size=60),
    st.data(),
)
def test_no_order_sequence_shares_a_gpu_or_obeys_an_older_token(
    steps: list[Any], data: st.DataObject
) -> None:
    """Any mixture of repeated, late, crossing and contradicting orders, with exits at any moment.

    The judge keeps its own history: processes per GPU from Spawn to Gone, and the highest token seen.
    """
    world = World()
    running: dict[tuple[str, int], TaskPlacement] = {}
    ever: set[tuple[str, int]] = set()
    highest: dict[int, int] = {}
    exits: set[tuple[str, int]] = set()
    for given_step in steps:
        if isinstance(given_step, str):
            if not running:
                continue
            task_id, token = data.draw(st.sampled_from(sorted(running)))
            if given_step == "spawned":
                world.feed(Spawned(task_id, token, 1, 1, 1))
            elif given_step == "grace":
                world.feed(GraceOver(task_id, token))
            else:
                del running[task_id, token]
                world.feed(Gone(task_id, token, Outcome(2, exit_code=0)))
                exits |= {(e.task_id, e.token) for e in world.reported() if isinstance(e, TaskExited)}
                assert (task_id, token) in exits
        else:
            world.feed(given_step)
        for decision in world.done:
            if not isinstance(decision, Spawn):
                continue
            order = decision.order
            key = (order.task_id, order.token)
            assert key not in ever, "started twice"
            for gpu in order.place.gpus:
                beside = sum(place.gpu_share_milli for place in running.values() if gpu in place.gpus)
                assert beside + order.place.gpu_share_milli <= 1_000, "more than one GPU holds"
            assert all(order.token >= highest.get(gpu, 0) for gpu in order.place.gpus), "an older token"
            ever.add(key)
            running[key] = order.place
            for gpu in order.place.gpus:
                highest[gpu] = order.token
    assert {task.task_id for task in world.state.live()} == {task_id for task_id, _ in running}
    assert all(task.status is not Status.WAITING or task.gpus for task in world.state.tasks.values())


# ------------------------------------------------------------------------------------------ environment


def test_the_environment_holds_no_secret_and_tells_the_gang() -> None:
    """The reporter's own addresses and passwords stay with it; torch finds its ranks."""
    node = NodeSpec(
        node_id="n1",
        boot_id="b",
        cores=4,
        host_memory_mib=100,
        gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}", model="V100", memory_mib=10) for i in range(2)),
    )
    peers = (
        Peer(rank=0, role="worker", node_id="n0", address="10.0.0.1"),
        Peer(rank=1, role="worker", node_id="n1", address="10.0.0.2"),
        Peer(rank=2, role="ps", node_id="n1", address="10.0.0.2"),
    )
    place = TaskPlacement(task_id="j.1", role="worker", rank=1, node_id="n1", gpus=(1,), cores=(0, 1, 2))
    order = start(5, (1,), "j.1", place=place, peers=peers, env={"LR": "0.1", "PENSTOCK_TOKEN": "99"})
    base = base_environment(
        {
            "PATH": "/v/bin:/bin",
            "HOME": "/home/ada",
            "VIRTUAL_ENV": "/v",
            "PENSTOCK_DSN": "postgresql://secret",
            "PENSTOCK_FAILPOINT": "x",
        },
        ["/v", "/v/bin"],
    )
    members = peers_json(gang_of(order, node))
    assert [peer["node_id"] for peer in json.loads(members)] == ["n0", "n1", "n1"]
    found = task_environment(order, node, base, {"PENSTOCK_PEERS": members}, virtual=False)
    assert not any("secret" in value for value in found.values())
    assert not {"PENSTOCK_FAILPOINT", "VIRTUAL_ENV"} & found.keys()
    expected = {
        "PATH": "/bin",
        "LR": "0.1",
        "PENSTOCK_TOKEN": "5",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "3",
    }
    assert {name: found[name] for name in expected} == expected
    assert task_environment(order, node, base, {}, virtual=True)["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_start_of_before_the_last_joining_waits_for_its_repeat() -> None:
    """A node was drained and left; what was ordered meanwhile the cell gave up, and ran elsewhere.

    Its reporter is started again on the same boot and finds that order in its partition. Were it obeyed, two
    attempts of one job would live. What still holds comes again, for the joining that the cell knows now.
    """
    state = NodeState("n1", "boot", named((0, 1)))
    state.incarnation = 8
    late = step(state, OrderRead(start(5, incarnation=7), 0))
    assert [type(decision) for decision in late] == [Note]
    assert not state.tasks
    again = step(state, OrderRead(start(5, incarnation=8), 0))
    assert [decision.order.token for decision in again if isinstance(decision, Spawn)] == [5]


def test_a_start_that_does_not_name_its_gpus_waits_for_an_upgrade(world: World) -> None:
    """A placer of an earlier version sends indexes; which cards it means only the machine of then knew."""
    late = world.feed(start(5, gpu_uuids=()))
    assert [type(decision) for decision in late] == [Note]
    assert world.spawned == []
    world.feed(start(5))
    assert world.spawned == [("t5", 5)]


def test_a_gpu_keeps_its_token_and_its_task_under_another_index() -> None:
    """A card was pulled and the reporter restarted: the next one has another index, and its task runs on."""
    before = World()
    before.run(start(7, (2,)))
    after = World()
    after.state = NodeState("n1", "boot", named((0, 2, 3)), 0, before.state.gpu_tokens, before.state.tasks)
    order = start(8, (1,), gpu_uuids=("GPU-2",))
    after.feed(order)
    assert after.spawned == [], "it is another's"
    after.feed(Gone("t7", 7, Outcome(2_000, exit_code=0)))
    assert after.spawned == [("t8", 8)]
    after.feed(start(9, (0,), gpu_uuids=("GPU-1",)))
    (refused,) = after.reported()
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.missing_gpus) == ("unknown_gpu", ("GPU-1",))
    assert "GPU-0, GPU-2, GPU-3" in refused.detail
