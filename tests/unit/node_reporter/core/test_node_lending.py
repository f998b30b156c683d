"""Stories of idle cores: who asked for no number of cores uses its share of them, until somebody needs
them."""

from typing import Any

import pytest

from penstock.model.decisions.orders import SetCores, StartTask
from penstock.model.nouns.types import TaskPlacement
from penstock_services.node_reporter.core.actions import SetAffinity, Spawn
from penstock_services.node_reporter.core.inputs import Gone, OrderRead, Outcome, Spawned, Stepped
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState, check

GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


def start(token: int, cores: tuple[int, ...], gpus: int = 0, *, spare: bool = True) -> StartTask:
    task_id = f"t{token}"
    place = TaskPlacement(
        task_id=task_id, role="worker", rank=0, node_id="n1", gpus=tuple(range(gpus)), cores=cores
    )
    return StartTask(
        token=token,
        node_id="n1",
        task_id=task_id,
        job_id="j",
        attempt=1,
        boot_id="boot",
        command=("train",),
        place=place,
        gpu_uuids=GPUS[:gpus],
        peers=(),
        rendezvous_port=29_500,
        grace_ms=10,
        spare_cores=spare,
    )


class World:
    """A node of 8 cores and 4 GPUs; `cores`: those that each task was last told to use."""

    def __init__(self) -> None:
        self.state = NodeState("n1", "boot", GPUS, cores=8)
        self.cores: dict[str, set[int]] = {}

    def feed(self, given: Any) -> None:
        for decision in step(self.state, given):
            if isinstance(decision, Spawn):
                self.cores[decision.order.task_id] = set(decision.order.place.cores)
            elif isinstance(decision, SetAffinity):
                self.cores[decision.task_id] = set(decision.cores)
        check(self.state)

    def run(self, order: StartTask) -> set[int]:
        self.feed(OrderRead(order, 1_000))
        self.feed(Spawned(order.task_id, order.token, 42, 1_001, 1_001))
        return self.cores[order.task_id]

    def end(self, token: int) -> None:
        self.feed(Gone(f"t{token}", token, Outcome(2_000, exit_code=0)))


@pytest.fixture
def world() -> World:
    return World()


def test_an_unknown_job_on_an_idle_node_has_more_than_one_core(world: World) -> None:
    """A preprocessing that nobody knows yet is promised one core of eight, and seven are idle."""
    assert world.run(start(1, (0,))) == set(range(8))


def test_a_job_with_a_gpu_gets_what_goes_with_its_gpu(world: World) -> None:
    """One of four GPUs: two of eight cores, so that its thread pools need not shrink when the other GPUs
    are used."""
    assert len(world.run(start(1, (0,), gpus=1))) == 2


def test_who_asked_for_cores_has_exactly_these(world: World) -> None:
    """A request is kept: it makes runs comparable."""
    assert world.run(start(1, (0, 1), spare=False)) == {0, 1}


def test_idle_cores_are_shared_and_taken_back(world: World) -> None:
    """Two unknown jobs share what is idle; a third one that asked for four cores has these alone; when it
    ends they come back."""
    world.run(start(1, (0,)))
    world.run(start(2, (1,)))
    assert world.cores["t1"] | world.cores["t2"] == set(range(8))
    assert not world.cores["t1"] & world.cores["t2"]
    assert world.run(start(3, (2, 3, 4, 5), spare=False)) == {2, 3, 4, 5}
    assert {0} <= world.cores["t1"]
    assert {1} <= world.cores["t2"]
    assert not (world.cores["t1"] | world.cores["t2"]) & {2, 3, 4, 5}
    world.end(3)
    assert world.cores["t1"] | world.cores["t2"] == set(range(8))


def test_cores_that_were_lent_with_a_start_are_taken_back_when_they_are_needed_at_once(world: World) -> None:
    """The first task has not reported its start when the second one is given all other cores."""
    world.feed(OrderRead(start(1, (0,)), 1_000))
    assert world.cores["t1"] == set(range(8))
    world.run(start(2, (1, 2, 3, 4, 5, 6, 7), spare=False))
    world.feed(Spawned("t1", 1, 42, 1_001, 1_001))
    assert world.cores["t1"] == {0}


def test_decided_cores_are_exact(world: World) -> None:
    """An operator, or the search for a training's cores, sets a number: nothing is lent beyond."""
    world.run(start(1, (0,)))
    world.feed(OrderRead(SetCores(token=2, node_id="n1", task_id="t1", cores=(0, 1, 2)), 1_000))
    assert world.cores["t1"] == {0, 1, 2}


def test_a_training_with_step_times_keeps_to_its_own_cores(world: World) -> None:
    """The contention-guard compares its speed with different numbers of cores; more than it knows of would
    mislead it."""
    world.run(start(1, (0,)))
    world.feed(Stepped("t1", 1))
    assert world.cores["t1"] == {0}
