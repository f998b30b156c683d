"""Stops of gangs whose ranks are tasks of their own: rank 0 saves, the others wait for its end and not
longer."""

import signal
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.model.decisions.ledger_events import StopDecided
from penstock.model.decisions.orders import StopTask
from penstock.model.inputs.external_events import JobCancelRequested, NodeLeft
from penstock.model.inputs.saves import SaveRefused
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.actions import KillAt, Signal
from penstock_services.node_reporter.core.inputs import Drain, Gone, Outcome
from penstock_services.placer.core.orders import orders_of
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.node_reporter.core.test_node_core import World, start, stop, world

__all__ = ["world"]

TERMINATE = Signal("j.1.w1", 1, signal.SIGTERM)


def gang(checkpoint: str = "sdk") -> CellDriver:
    """A job of two workers, each on a node of its own, which is being stopped."""
    cell = CellDriver()
    cell.join(node_spec("n1", 1), node_spec("n2", 1))
    cell.submit("j", job_spec(workers=2, checkpoint=checkpoint, attempts=2), estimate(1))
    cell.start("j")
    return cell


def stops(cell: CellDriver, fact: Event) -> dict[str, bool]:
    """Task → whether the orders after this fact of the last record say that rank 0 has ended."""
    found = orders_of(cell.state, fact, cell.state.seq)
    return {order.task_id: order.chief_ended for order in found if isinstance(order, StopTask)}


def stopped(cell: CellDriver) -> StopDecided:
    [decided] = [
        fact for fact in cell.feed(JobCancelRequested(job_id="j")).facts if isinstance(fact, StopDecided)
    ]
    return decided


def test_other_ranks_are_told_when_rank_0_has_ended() -> None:
    """A gang on two nodes is preempted. Rank 0 ends its iteration and saves, for which it needs the other
    one; that hangs in its next all-reduce, and was killed after its grace. A placer that starts meanwhile
    says the same."""
    cell = gang()
    assert stops(cell, stopped(cell)) == {"j.1.w0": False, "j.1.w1": False}
    fact = cell.exit("j.1.w0", 75).facts[0]
    assert stops(cell, fact) == {"j.1.w1": True}
    assert [order.chief_ended for order in cell.orders() if isinstance(order, StopTask)] == [True]
    fact = cell.exit("j.1.w1", 143).facts[0]
    assert stops(cell, fact) == {}


def test_other_ranks_are_told_where_rank_0_saves_nothing_or_its_node_is_gone() -> None:
    """Its script never calls `checkpoint()`, or its node burns down: there is nothing to wait for."""
    cell = gang()
    stopped(cell)
    refused = SaveRefused(node_id="n1", task_id="j.1.w0", token=cell.job("j").token, at_ms=5, reason="nobody")
    assert stops(cell, cell.feed(refused).facts[0]) == {"j.1.w0": False, "j.1.w1": True}
    cell = gang()
    stopped(cell)
    facts = cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="shutdown")).facts
    assert [found for fact in facts if (found := stops(cell, fact))] == [{"j.1.w1": True}]


def test_a_gang_that_goes_down_with_its_node_needs_no_stops() -> None:
    """Its one node burns down. The record that gives its tasks up, and decides to stop them, has it wait
    again."""
    cell = CellDriver()
    cell.join(node_spec("n1", 2))
    cell.submit("j", job_spec(workers=2, checkpoint="sdk", attempts=2), estimate(1))
    cell.start("j")
    facts = cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="shutdown")).facts
    assert any(isinstance(fact, StopDecided) for fact in facts)
    assert not cell.job("j").tasks
    assert not any(stops(cell, fact) for fact in facts)


def test_a_gang_whose_rank_0_fails_is_stopped_at_once() -> None:
    """Nothing is saved any more. One stop is ordered, by the record that decides on it."""
    cell = gang()
    step = cell.exit("j.1.w0", 1)
    assert [found for fact in step.facts if (found := stops(cell, fact))] == [{"j.1.w1": True}]


@pytest.mark.parametrize("checkpoint", ["none", "signal"])
def test_ranks_that_save_by_themselves_or_not_at_all_are_told_together(checkpoint: str) -> None:
    """All of them may have to save, and nobody knows which."""
    cell = gang(checkpoint)
    assert stops(cell, stopped(cell)) == {"j.1.w0": False, "j.1.w1": False}
    assert stops(cell, cell.exit("j.1.w0", 75).facts[0]) == {}


def member(world: World, rank: int, token: int = 1, checkpoint: str | None = "", **more: Any) -> None:
    order = start(token, (rank,), f"j.{token}.w{rank}", checkpoint=checkpoint, **more)
    world.run(replace(order, place=replace(order.place, rank=rank)))


def test_a_node_keeps_a_rank_alive_until_rank_0_has_ended(world: World) -> None:
    """Rank 0 is on another node. The order is repeated when that has ended; the grace still counts from the
    first one."""
    member(world, 1)
    assert world.feed(stop(2, "j.1.w1"))[1:] == [KillAt("j.1.w1", 1, 1_100)]
    assert world.feed(stop(2, "j.1.w1"), 1_010) == [], "its reporter joins again"
    assert world.feed(stop(2, "j.1.w1", 20), 1_020)[1:] == [KillAt("j.1.w1", 1, 1_040)], "a shorter grace"
    told = replace(stop(2, "j.1.w1"), chief_ended=True)
    assert world.feed(told, 1_030)[1:] == [TERMINATE]
    assert world.feed(told, 1_030) == []


def test_ranks_of_one_node_end_with_rank_0_without_an_order(world: World) -> None:
    """The node is drained by its own reporter, or has lost its lease, and hears of nobody."""
    member(world, 0)
    member(world, 1)
    member(world, 2, token=2)
    told = [decision for decision in world.feed(Drain(1_000, 100)) if isinstance(decision, Signal)]
    assert [(signal_.task_id, signal_.number) for signal_ in told] == [("j.1.w0", signal.SIGTERM)]
    ended = world.feed(Gone("j.1.w0", 1, Outcome(1_050, exit_code=75)))
    assert [decision for decision in ended if isinstance(decision, Signal)] == [TERMINATE]
    assert world.state.tasks["j.2.w2"].awaits_chief, "the rank of another attempt"


@pytest.mark.parametrize("checkpoint", ["", None])
def test_who_waits_for_nobody_is_told_at_once(world: World, checkpoint: str | None) -> None:
    """Rank 0 of a gang that saves by the SDK, and any rank of another."""
    rank = 0 if checkpoint == "" else 1
    member(world, rank, checkpoint=checkpoint)
    assert Signal(f"j.1.w{rank}", 1, signal.SIGTERM) in world.feed(stop(2, f"j.1.w{rank}"))
