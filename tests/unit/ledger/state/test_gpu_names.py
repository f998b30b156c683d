"""A GPU is its UUID: in the cell's books it keeps its slot, and a slot its GPU, while a task holds it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.queries.tables import gpu_names, short_uuid
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.orders import AnswerJoin, StartTask
from penstock.model.inputs.external_events import (
    GpuFaulted,
    NodeChanged,
    NodeJoined,
    NodeLeft,
    OrderRefused,
    RunningTask,
)
from penstock.model.nouns.nodes import Gpu, GpuFault, NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock_services.placer.core.orders import orders_of
from tests.support.cluster.driver import CellDriver, estimate

CARDS = "ABCDEFGH"
UUID = "GPU-5d0f2b1e-77aa-4f3c-9d0b-0123456789ab"
TASK = {"gpus": [2, 0], "gpu_uuids": [UUID, "VIRTUAL-n1-0"]}


def machine(cards: Sequence[str], *, memory_mib: int = 131_072, boot: str = "b1") -> NodeSpec:
    """One node with these cards, in the order in which NVML finds them."""
    gpus = tuple(
        Gpu(index=index, uuid=uuid, model="V100", memory_mib=16_384) for index, uuid in enumerate(cards)
    )
    return NodeSpec(node_id="n1", boot_id=boot, cores=32, host_memory_mib=memory_mib, gpus=gpus)


def cards_of(cell: CellDriver, job_id: str) -> tuple[str, ...]:
    """UUIDs of the GPUs that the job's first task holds."""
    (place,) = (task.place for task in cell.job(job_id).tasks.values())
    uuids = cell.state.nodes["n1"].gpu_uuids
    return tuple(uuids[slot] for slot in place.gpus)


@pytest.fixture
def cell() -> CellDriver:
    driver = CellDriver(PlacerSettings(profile="fifo"))
    driver.join(machine("ABCD"))
    return driver


def test_a_gpu_belongs_to_one_node() -> None:
    """A second reporter, under another node id, offers the GPU on which a job runs."""
    driver = CellDriver(PlacerSettings(profile="fifo"))
    driver.join(machine("A"))
    running(driver, "j1")
    twin = msgspec.structs.replace(machine("BA"), node_id="n2")
    refused = driver.feed(NodeJoined(node=twin, incarnation=1))
    assert "n2" not in driver.state.nodes, "what n2 has is not given out while n1 has card A"
    (order,) = orders_of(driver.state, refused.facts[0], driver.head.seq)
    assert isinstance(order, AnswerJoin)
    assert order.verdict == "gpu_of_another_node"
    assert load(dump(driver.state)).index.gpu_node == {"A": "n1"}
    driver.feed(NodeLeft(node_id="n1", boot_id="b1", proof="fenced"))
    driver.feed(NodeJoined(node=twin, incarnation=2))
    assert driver.state.nodes["n2"].gpu_uuids == ("B", "A"), "n1 is fenced: the card may have moved"
    back = driver.feed(NodeJoined(node=machine("A", boot="b2"), incarnation=1))
    assert back.reason == "gpu_of_another_node"
    assert driver.state.nodes["n1"].status is NodeStatus.GONE
    assert driver.feed(NodeChanged(node=machine("BA"))).outcome == "rejected"


def running(cell: CellDriver, *job_ids: str) -> None:
    for job_id in job_ids:
        cell.submit(job_id)
        cell.start(job_id)


def test_a_card_that_was_renumbered_is_not_given_out_twice(cell: CellDriver) -> None:
    """B is pulled in operation and the reporter restarted: NVML now calls C 1, where j3 runs."""
    running(cell, "j1", "j2", "j3")
    assert cards_of(cell, "j3") == ("C",)
    cell.exit("j2.1.w0")
    cell.feed(NodeChanged(node=machine("ACD")))
    cell.submit("k4")
    cell.submit("k5")
    assert (cards_of(cell, "j3"), cards_of(cell, "k4")) == (("C",), ("D",))
    assert cell.job("k5").status is JobStatus.QUEUED, "three cards, three jobs"
    (order,) = (order for order in cell.orders() if isinstance(order, StartTask) and order.job_id == "k4")
    assert order.gpu_uuids == ("D",)
    cell.exit("j3.1.w0")
    assert cards_of(cell, "k5") == ("C",)


def test_a_card_that_is_gone_holds_its_task_and_nothing_else(cell: CellDriver) -> None:
    """C falls off the bus under j3: its slot is no other card's, and its end frees nothing before the card is
    back."""
    running(cell, "j1", "j2", "j3")
    cell.feed(NodeChanged(node=machine("ABD")))
    assert cards_of(cell, "j3") == ("C",)
    cell.exit("j3.1.w0")
    cell.submit("k", need=estimate(2))
    assert cell.job("k").status is JobStatus.QUEUED, "only D is free"
    cell.feed(NodeChanged(node=machine("ABDC")))
    assert sorted(cards_of(cell, "k")) == ["C", "D"]


def test_a_new_card_takes_the_slot_of_one_that_is_gone(cell: CellDriver) -> None:
    """A broken card is replaced while its neighbours work."""
    running(cell, "j1", "j2", "j3")
    cell.exit("j2.1.w0")
    cell.feed(NodeChanged(node=machine("AECD")))
    assert cell.state.nodes["n1"].gpu_uuids == ("A", "E", "C", "D")
    cell.feed(NodeChanged(node=machine("FAEC")))
    assert cell.state.nodes["n1"].gpu_uuids == ("A", "E", "C", "F")


def test_an_idle_node_has_slots_as_nvml_has_indexes(cell: CellDriver) -> None:
    running(cell, "j1")
    cell.feed(NodeChanged(node=machine("BA")))
    assert cell.state.nodes["n1"].gpu_uuids == ("A", "B")
    cell.exit("j1.1.w0")
    cell.feed(NodeJoined(node=machine("BA", boot="b2")))
    assert cell.state.nodes["n1"].gpu_uuids == ("B", "A")


def test_a_fault_is_of_the_card_and_not_of_the_index(cell: CellDriver) -> None:
    """Xid 79 on what NVML calls 0 now, and the cell calls otherwise."""
    running(cell, "j1", "j2")
    cell.feed(NodeChanged(node=machine("DCBA")))
    cell.feed(GpuFaulted(node_id="n1", gpu=0, uuid="D", fault="xid", code=79))
    cell.submit("k")
    cell.submit("l")
    assert cards_of(cell, "k") == ("C",)
    assert cell.job("l").status is JobStatus.QUEUED
    step = cell.feed(GpuFaulted(node_id="n1", gpu=0, uuid="X", fault="xid", code=79))
    assert (step.outcome, step.reason) == ("rejected", "unknown_gpu")


def test_a_fault_outlives_its_reporter_and_ends_with_its_boot(cell: CellDriver) -> None:
    """The node's journal knows what broke since the boot; each of its joinings reports it, until a new
    boot."""
    running(cell, "j1")
    broken = (GpuFault(uuid="B", fault="ecc", code=5), GpuFault(uuid="X", fault="xid", code=79))
    alive = tuple(RunningTask(task_id=task, token=cell.job("j1").token) for task in cell.job("j1").tasks)
    cell.feed(NodeJoined(node=machine("DCBA"), tasks=alive, faults=broken))
    cell.submit("k", need=estimate(3))
    assert cell.job("k").status is JobStatus.QUEUED
    running(cell, "j2")
    assert cards_of(cell, "j2") == ("C",)
    cell.feed(NodeJoined(node=machine("ABCD", boot="b2")))
    assert cell.job("k").status is JobStatus.LAUNCHING


def test_what_a_node_does_not_have_is_not_tried_again(cell: CellDriver) -> None:
    """The card went between two reports: the refusal names it, and the job goes to another one."""
    cell.submit("j")
    assert cards_of(cell, "j") == ("A",)
    cell.feed(
        OrderRefused(
            node_id="n1",
            task_id="j.1.w0",
            token=cell.job("j").token,
            reason="unknown_gpu",
            highest_token=0,
            missing_gpus=("A",),
        )
    )
    cell.at(2_000)
    assert cards_of(cell, "j") == ("B",)


def test_two_cards_of_one_name_are_refused(cell: CellDriver) -> None:
    step = cell.feed(NodeJoined(node=machine("AAB")))
    assert (step.outcome, step.reason) == ("rejected", "duplicate_gpu_uuid")


def test_an_inventory_may_shrink_below_what_is_held(cell: CellDriver) -> None:
    """A memory module fails; what was promised stays promised, and nothing more is."""
    cell.submit("j", need=estimate(memory_mib=100_000))
    cell.feed(NodeChanged(node=machine("ABCD", memory_mib=64_000)))
    assert cell.state.nodes["n1"].free().host_memory_mib == 0
    cell.submit("k")
    assert cell.job("k").status is JobStatus.QUEUED
    cell.start("j")
    cell.exit("j.1.w0")
    assert cell.job("k").status is JobStatus.LAUNCHING


def test_a_snapshot_keeps_the_slots(cell: CellDriver) -> None:
    running(cell, "j1", "j2", "j3")
    cell.feed(NodeChanged(node=machine("DC")))
    loaded = load(dump(cell.state))
    assert loaded.nodes["n1"].gpu_uuids == ("A", "B", "C", "D")
    assert loaded.nodes["n1"].present_gpu_mask == 0b1100
    assert dump(loaded) == dump(cell.state)


def test_people_see_short_names() -> None:
    """`get gpus` names real GPUs in short; the names of pretended ones stay whole."""
    assert short_uuid(UUID) == "GPU-5d0f2b1e"
    assert short_uuid("VIRTUAL-n1-0") == "VIRTUAL-n1-0"


@pytest.mark.parametrize("answer", [TASK, {"gpus": [2, 0], "gpu_uuids": []}], ids=["named", "from before"])
def test_a_task_lists_its_gpus_by_name_and_slot(answer: dict[str, Any]) -> None:
    """`describe job` and `why`."""
    whole = answer is TASK
    assert gpu_names(answer) == ("GPU-5d0f2b1e (2), VIRTUAL-n1-0 (0)" if whole else "2,0")
    assert gpu_names(answer, wide=True) == (f"{UUID} (2), VIRTUAL-n1-0 (0)" if whole else "2,0")
    assert gpu_names({"gpus": [], "gpu_uuids": []}) == "–"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_order_of_repairs_gives_a_card_to_two_jobs(data: st.DataObject) -> None:
    """Cards come, go and change places while jobs come and go; `check` runs after every record."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(machine("ABCD"))
    held: dict[str, tuple[str, ...]] = {}
    for number in range(data.draw(st.integers(5, 25))):
        live = [job_id for job_id, job in cell.state.jobs.items() if job.status is JobStatus.RUNNING]
        what = data.draw(st.sampled_from(["submit", "cards"] + ["exit"] * bool(live)))
        if what == "submit":
            cell.submit(f"j{number}", need=estimate(data.draw(st.integers(1, 3))))
        elif what == "exit":
            done = data.draw(st.sampled_from(live))
            del held[done]
            cell.exit(f"{done}.1.w0")
        else:
            cards = data.draw(st.lists(st.sampled_from(CARDS), max_size=6, unique=True))
            cell.feed(NodeChanged(node=machine(cards)))
        present = {gpu.uuid for gpu in cell.state.nodes["n1"].spec.gpus}
        for job in list(cell.state.jobs.values()):
            if job.status is JobStatus.LAUNCHING:
                held[job.job_id] = cards_of(cell, job.job_id)
                assert present.issuperset(held[job.job_id])
                cell.start(job.job_id)
        assert {job_id: cards_of(cell, job_id) for job_id in held} == held, "a task's cards never change"
        cards_held = [uuid for uuids in held.values() for uuid in uuids]
        assert len(set(cards_held)) == len(cards_held)
