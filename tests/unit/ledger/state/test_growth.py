"""Stories of cells that run for years: what the state holds is bounded by what is live."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ledger.check.check import check
from penstock.ledger.derived import departed
from penstock.ledger.fold.evolve import begin, evolve
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import NodeLost
from penstock.model.decisions.orders import AnswerJoin
from penstock.model.inputs.external_events import NodeCordoned, NodeJoined, NodeLeft, NodeUncordoned
from penstock.model.nouns.settings import PlacerSettings
from penstock_services.placer.core.guard import refusal
from penstock_services.placer.core.orders import orders_of
from tests.support.cluster.driver import CellDriver, job_spec, node_spec
from tests.unit.ledger.fold.test_node_orders import cordon

WINDOW_MS = PlacerSettings().freeze_window_ms


def test_timers_of_ended_jobs_leave_nothing_behind() -> None:
    """Jobs with both time-outs come and go; each sets two or three timers and ends long before they are
    due."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for number in range(300):
        cell.submit(f"j{number}", job_spec(queue_timeout_ms=3_600_000, run_timeout_ms=3_600_000))
        cell.start(f"j{number}")
        cell.exit(f"j{number}.1.w0")
    assert not cell.state.timers
    assert len(cell.state.timer_heap) <= 64


def test_nodes_that_are_gone_for_good_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud's machines have a new name each day. The last few that left stay known; a late copy of an old
    joining is refused."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 3)
    cell = CellDriver()
    cell.join(node_spec("stays"))
    cell.feed(cordon("stays"))
    for number in range(40):
        cell.now_ms += WINDOW_MS
        cell.feed(NodeJoined(node=node_spec(f"n{number}"), incarnation=1))
        cell.submit(f"j{number}")
        cell.start(f"j{number}")
        cell.exit(f"j{number}.1.w0")
        cell.feed(NodeLeft(node_id=f"n{number}", boot_id="b1", proof="deleted"))
    assert len(cell.state.nodes) <= 6, list(cell.state.nodes)
    assert len(cell.state.node_at) <= 7, "a new node takes the place of a forgotten one"
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
    """One member of a gang was lost with its node; the other is being stopped, and its orders name all
    places."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 0)
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1), node_spec("n2", gpus=1))
    cell.submit("g", job_spec(workers=2))
    cell.start("g")
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="deleted"))
    cell.now_ms += WINDOW_MS + 1
    cell.join(node_spec("n3"))
    assert "n1" in cell.state.nodes
    assert cell.orders()
    cell.exit("g.1.w1", None, cause="stopped", signal=15)
    cell.join(node_spec("n4"))
    assert "n1" not in cell.state.nodes


def test_a_cloud_of_nodes_that_leaves_at_once_is_forgotten() -> None:
    """A night's 20,000 spot machines are deleted within seconds, and nothing takes their place; one that
    stays is the latest to have come."""
    state, count, seq = CellState(), 20_000, 0

    def fold(*facts: Any, now_ms: int) -> None:
        nonlocal seq
        seq += 1
        begin(state, seq, now_ms, 1)
        for fact in facts:
            evolve(state, fact)

    first_s = time.thread_time()
    for number in range(count):
        fold(NodeJoined(node=node_spec(f"n{number}"), incarnation=1), now_ms=1_000)
    first_s = (time.thread_time() - first_s) / count
    fold(NodeJoined(node=node_spec("stays"), incarnation=1), now_ms=1_000)
    for number in range(count):
        left = NodeLeft(node_id=f"n{number}", boot_id="b1", proof="deleted")
        fold(left, NodeLost(node_id=f"n{number}"), now_ms=2_000)
    assert len(state.nodes) == count + 1, "within the freeze window all of them count as missing (LAW 5)"
    records = count // departed.MAX_DROPPED_PER_RECORD
    for _ in range(records):
        fold(now_ms=3_000 + WINDOW_MS)
    assert len(state.nodes) == departed.MAX_GONE_NODES + 1
    assert len(state.forgotten_nodes) == count - departed.MAX_GONE_NODES
    assert len(dump(state)) < 1_500 << 10
    assert dump(load(dump(state))) == dump(state)
    took_s = []
    for number in range(100):
        before_s = time.thread_time()
        fold(NodeJoined(node=node_spec(f"m{number}"), incarnation=1), now_ms=4_000 + WINDOW_MS)
        took_s.append(time.thread_time() - before_s)
    assert state.nodes["m0"].ordinal == 0, "places of forgotten nodes are taken again"
    assert check(state) == []
    assert sorted(took_s)[50] < 20 * first_s, (
        "the median of its processor time, against the mean in a cell that grows"
    )


def test_nodes_that_left_within_the_freeze_window_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch dies and a watch reports one machine after the other as deleted: past half of them, the cell
    freezes."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 1)
    cell = CellDriver()
    cell.join(*(node_spec(f"n{number}") for number in range(10)))
    for number in range(6):
        assert not cell.state.frozen
        cell.feed(NodeLeft(node_id=f"n{number}", boot_id="b1", proof="deleted"))
    assert cell.state.frozen


def test_holes_at_the_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines that came last go for good: nothing is as wide as the cell once was, and a replica from a
    snapshot agrees."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 0)
    cell = CellDriver(PlacerSettings(freeze_window_ms=0))
    cell.join(*(node_spec(f"n{number}") for number in range(40)))
    for number in [*range(1, 20), *range(21, 40)]:
        cell.now_ms += 1
        cell.feed(NodeLeft(node_id=f"n{number}", boot_id="b1", proof="shutdown"))
    cell.now_ms += 1
    cell.submit("j", job_spec(workers=5))
    assert set(cell.state.nodes) == {"n0", "n20"}
    assert cell.state.node_at == load(dump(cell.state)).node_at == ["n0", *[""] * 19, "n20"]
    cell.join(node_spec("new"))
    assert cell.state.nodes["new"].ordinal == 1
    assert len(cell.state.sound_gpus) == 21


def asked_of(node: NodeState) -> list[Any]:
    """What a reader may ask of a node, whether or not it was forgotten meanwhile."""
    return [
        node.spec,
        node.status,
        node.free_gpu_mask,
        node.free_core_mask,
        node.free_host_memory_mib,
        node.shared,
        node.faulted_gpu_mask,
        node.leaving,
        node.incarnation,
        node.tasks,
        node.orphan_tasks,
        node.cordon,
        node.suspicion,
    ]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), profile=st.sampled_from(["fgd", "liquid", "srtf"]))
def test_forgetting_changes_no_answer(seed: int, profile: str) -> None:
    """Machines come, run jobs, are cordoned, go and return; the same ledger is folded by a reader that
    forgets none of them."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departed, "MAX_GONE_NODES", 2)
        patch.setattr(departed, "MAX_DROPPED_PER_RECORD", 2)
        cell = CellDriver(PlacerSettings(profile=profile, freeze_window_ms=50))
        for number in range(70):
            cell.now_ms += 10 * int(rng.integers(5))
            wander(cell, f"n{rng.integers(20)}", number, int(rng.integers(9)))
        for number in range(70, 75):
            wander(cell, f"late-{number}", number, 0)
            wander(cell, f"late-{number}", number, 5)
            cell.now_ms += 60
        assert cell.state.forgotten_nodes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departed, "MAX_GONE_NODES", 1_000)
        model = Replica()
        for offset, value in enumerate(cell.values):
            model.take(value, offset)
    for state in (cell.state, load(dump(cell.state))):
        assert check(state) == []
        assert dump(state) == dump(cell.state)
        for node_id, node in model.state.nodes.items():
            if node_id in state.nodes:
                assert asked_of(state.nodes[node_id]) == asked_of(node)
            else:
                assert (node.status, node.tasks, node.cordon) == ("gone", {}, None)
                assert state.forgotten_nodes[node_id] == node.incarnation
            for incarnation in range(1, 70, 3):
                joining = NodeJoined(node=node_spec(node_id, boot="b9"), incarnation=incarnation)
                assert refusal(state, joining) == refusal(model.state, joining)
        assert state.index.gpu_node == model.state.index.gpu_node
        for mask in ("placeable", "cordoned"):
            here, there = getattr(state.index, mask), getattr(model.state.index, mask)
            assert named(state, here) == named(model.state, there)
        assert state.frozen == model.state.frozen
        assert list(state.queue.values()) == list(model.state.queue.values())


def named(state: CellState, mask: int) -> set[str]:
    return {state.node(ordinal).spec.node_id for ordinal in range(mask.bit_length()) if mask >> ordinal & 1}


def wander(cell: CellDriver, node_id: str, number: int, kind: int) -> None:
    """One input about this node, or a job of two workers somewhere."""
    node = cell.state.nodes.get(node_id)
    boot = f"b{number}"
    match kind:
        case 0 | 1 | 2 if node is None or number % 4 == 0:
            cell.feed(NodeJoined(node=node_spec(node_id, 2, boot=boot), incarnation=number + 1))
        case 3 | 4 | 5 if node is not None:
            proof: Any = ("deleted", "shutdown", "fenced")[kind - 3]
            cell.feed(NodeLeft(node_id=node_id, boot_id=node.spec.boot_id, proof=proof))
        case 6 if node is not None and node.cordon is None:
            cell.feed(NodeCordoned(node_id=node_id, drain=False, by="ann", reason="fans"))
        case 6 if node is not None:
            cell.feed(NodeUncordoned(node_id=node_id, by="ann", reason="mended"))
        case _:
            for job_id, job in list(cell.state.jobs.items()):
                if job.tasks and all(task.status == "assigned" for task in job.tasks.values()):
                    cell.start(job_id)
                    for task_id in list(job.tasks)[: 1 + number % 3]:
                        cell.exit(task_id)
            cell.submit(f"j{number}", job_spec(workers=2))
