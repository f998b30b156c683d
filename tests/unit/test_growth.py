"""Stories of cells that run for years: what the state holds is bounded by what is live."""

import pytest

from penstock.ledger.check import check
from penstock.ledger.snapshot import dump, load
from penstock.model.external_events import NodeJoined, NodeLeft
from penstock.model.orders import AnswerJoin
from penstock_services.placer.core.orders import orders_of
from tests.support.driver import CellDriver, job_spec, node_spec
from tests.unit.test_node_orders import cordon


def test_timers_of_ended_jobs_leave_nothing_behind() -> None:
    """Jobs with both time-outs come and go; each sets two or three timers and ends long before they are due."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for number in range(300):
        cell.submit(f"j{number}", job_spec(queue_timeout_ms=3_600_000, run_timeout_ms=3_600_000))
        cell.start(f"j{number}")
        cell.exit(f"j{number}.1.w0")
    assert not cell.state.timers
    assert len(cell.state.timer_heap) <= 64


def test_nodes_that_are_gone_for_good_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud's machines have a new name each day. The last few that left stay known; a late copy of an old joining is refused."""
    monkeypatch.setattr("penstock.ledger.evolve_nodes.MAX_GONE_NODES", 3)
    cell = CellDriver()
    cell.join(node_spec("stays"))
    cell.feed(cordon("stays"))
    for number in range(40):
        cell.feed(NodeJoined(node=node_spec(f"n{number}"), incarnation=1))
        cell.submit(f"j{number}")
        cell.start(f"j{number}")
        cell.exit(f"j{number}.1.w0")
        cell.feed(NodeLeft(node_id=f"n{number}", boot_id="b1", proof="deleted"))
    assert len(cell.state.nodes) <= 6, list(cell.state.nodes)
    assert len(cell.state.node_at) == len(cell.state.nodes)
    assert "stays" in cell.state.nodes
    late = cell.feed(NodeJoined(node=node_spec("n0"), incarnation=1))
    assert late.reason == "stale_join"
    [order] = [order for fact in late.facts for order in orders_of(cell.state, fact, cell.head.seq)]
    assert isinstance(order, AnswerJoin)
    assert order.highest_incarnation == 1, "a node that lost its journal learns how to join"
    assert cell.feed(NodeJoined(node=node_spec("n0"), incarnation=2)).outcome == "committed"
    again = load(dump(cell.state))
    assert dump(again) == dump(cell.state)
    assert check(again) == []


def test_a_gone_node_that_a_gang_still_names_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member of a gang was lost with its node; the other is being stopped, and its orders name all places."""
    monkeypatch.setattr("penstock.ledger.evolve_nodes.MAX_GONE_NODES", 0)
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1), node_spec("n2", gpus=1))
    cell.submit("g", job_spec(workers=2))
    cell.start("g")
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="deleted"))
    cell.join(node_spec("n3"))
    assert "n1" in cell.state.nodes
    assert cell.orders()
    cell.exit("g.1.w1", None, cause="stopped", signal=15)
    cell.join(node_spec("n4"))
    assert "n1" not in cell.state.nodes
