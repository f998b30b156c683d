"""Stories of operators who take nodes out of use: cordon, drain, uncordon, fence."""

from base64 import b64encode
from typing import Any
from zlib import compress

import pytest
from msgspec.structs import replace

from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import JobRequeued, TaskLost
from penstock.model.decisions.orders import Order, StopTask, pack_peers, unpack_peers
from penstock.model.inputs.external_events import NodeCordoned, NodeLeft, NodeUncordoned, TaskStarted
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.wire.codec import encode
from penstock.why.explain import explain
from penstock_services.placer.core.orders import outstanding, start_orders
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

ADA = "ada@workstation-7"
TOO_MUCH = b64encode(compress(b"[" + b" " * Order.MAX_BYTES + b"]")).decode()


def cordon(node_id: str = "n1", *, drain: bool = False) -> NodeCordoned:
    return NodeCordoned(node_id=node_id, drain=drain, by=ADA, reason="fans")


def uncordon(node_id: str = "n1") -> NodeUncordoned:
    return NodeUncordoned(node_id=node_id, by=ADA, reason="fans are new")


@pytest.mark.parametrize("profile", ["liquid", "drf", "srtf", "hived", "fgd"])
def test_nothing_new_is_placed_on_a_cordoned_node_and_what_runs_there_runs_on(profile: str) -> None:
    """Its reporter is upgraded meanwhile: a new joining does not end the cordon. Policies that preempt stop
    no job for it."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("n1"))
    cell.submit("runs")
    cell.at(0)
    cell.start("runs")
    cell.feed(cordon())
    cell.submit("waits")
    cell.at(1_000)
    assert cell.job("runs").status is JobStatus.RUNNING
    assert cell.job("waits").status is JobStatus.QUEUED
    why = explain(cell.state, "waits")
    assert why.histogram == {Reason.NODES_CORDONED: 1}
    assert why.now_or_never == "later"
    assert f"n1 is cordoned by {ADA}: fans" in explain(cell.state, "runs").text
    cell.join(node_spec("n1", boot="b2"))
    cell.at(2_000)
    assert not cell.job("waits").tasks, "the new boot does not end the cordon"
    assert load(dump(cell.state)).index.cordoned == cell.state.index.cordoned
    cell.feed(uncordon())
    cell.at(3_000)
    assert cell.job("waits").status is JobStatus.LAUNCHING


def test_a_drained_node_empties_and_its_jobs_go_on_elsewhere() -> None:
    """Two jobs and a gang on the node: each is stopped with its grace, and queues again at its old place."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1"))
    cell.submit("a")
    cell.submit("b", job_spec(workers=2))
    cell.start("a")
    cell.start("b")
    cell.join(node_spec("n2"))
    step = cell.feed(cordon(drain=True))
    assert kinds(step) == [
        "node.cordoned",
        "job.preempted",
        "stop.decided",
        "job.preempted",
        "stop.decided",
    ]
    assert {order.task_id for order in cell.orders() if isinstance(order, StopTask)} == {
        "a.1.w0",
        "b.1.w0",
        "b.1.w1",
    }
    found = cell.exit("a.1.w0", None, cause="stopped", signal=15)
    requeued = [fact for fact in found.facts if isinstance(fact, JobRequeued)]
    assert [fact.reason for fact in requeued] == ["drained"]
    assert cell.job("a").tasks["a.2.w0"].place.node_id == "n2"
    assert cell.job("a").retries.infrastructure == 1, "a drain costs no attempt of the user's"
    for task_id in ("b.1.w0", "b.1.w1"):
        cell.exit(task_id, None, cause="stopped", signal=15)
    assert {task.place.node_id for task in cell.job("b").tasks.values()} == {"n2"}
    assert not cell.state.nodes["n1"].tasks


def test_a_large_node_is_drained_in_bounded_records() -> None:
    """Sixteen shares on each of sixteen GPUs are more jobs than one record may stop."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=16, cores=1_000, memory_mib=65_536))
    for number in range(16):
        for share in range(4):
            cell.submit(f"j{number}-{share}", need=shared())
    assert len(cell.state.nodes["n1"].tasks) == 64
    first = kinds(cell.feed(cordon(drain=True))).count("stop.decided")
    rest = [kinds(step).count("stop.decided") for step in cell.at(0)]
    assert (first, sum(rest)) == (32, 32)


def shared() -> object:
    from msgspec.structs import replace

    whole = estimate(1, cores=1, memory_mib=64)
    return replace(whole, worker=replace(whole.worker, gpu_share_milli=250))


def test_a_fence_names_who_and_why_wherever_its_jobs_are_explained() -> None:
    """A machine burnt: its jobs go on elsewhere at once, and their story names the operator."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("a")
    cell.start("a")
    cell.join(node_spec("n2"))
    step = cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="fenced", by=ADA, reason="it burnt"))
    [lost] = [fact for fact in step.facts if isinstance(fact, TaskLost)]
    assert lost.reason == f"its node was fenced by {ADA}: it burnt"
    assert cell.job("a").tasks["a.2.w0"].place.node_id == "n2"


def test_orders_that_change_nothing_are_refused() -> None:
    """Two operators at once, and one who mistypes a name."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    assert cell.feed(cordon("n9")).reason == "unknown_node"
    assert cell.feed(uncordon()).reason == "not_cordoned"
    assert cell.feed(cordon()).outcome == "committed"
    assert cell.feed(cordon()).reason == "already_cordoned"
    assert cell.feed(cordon(drain=True)).outcome == "committed"
    assert cell.feed(uncordon()).outcome == "committed"


def test_a_frozen_cell_drains_nobody_until_it_thaws() -> None:
    """Most nodes vanished while one was being drained: its jobs may be all that runs, and stay until the
    others return."""
    cell = CellDriver()
    cell.join(*(node_spec(f"n{number}") for number in range(4)))
    cell.submit("a", need=estimate(4))
    cell.start("a")
    on = cell.job("a").tasks["a.1.w0"].place.node_id
    others = [node_id for node_id in cell.state.nodes if node_id != on]
    for node_id in others:
        cell.feed(NodeLeft(node_id=node_id, boot_id="b1", proof="lease_outlived"))
    assert cell.state.frozen
    cell.feed(cordon(on, drain=True))
    assert cell.job("a").status is JobStatus.RUNNING
    cell.join(*(node_spec(node_id) for node_id in others))
    cell.at(0)
    assert cell.job("a").status is JobStatus.STOPPING


def test_a_large_gangs_peers_are_ordered_once_per_node() -> None:
    """256 workers on 32 nodes: 5 MiB of orders would name every member to every worker. A placer that begins
    a term repeats what is left of them in the same way; small gangs' orders are complete each."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    for number in range(32):
        cell.join(node_spec(f"n{number}", gpus=8, cores=64))
    cell.submit("large", job_spec(workers=256))
    job = cell.job("large")
    assert len(job.tasks) == 256
    orders = start_orders(cell.state, "large", job.token)
    _named_once(orders, 32)
    size = sum(len(encode(order)) for order in orders)
    peers = unpack_peers(orders[0].packed_peers or "")
    whole = sum(len(encode(replace(order, peers=peers, peers_of=None))) for order in orders)
    assert size < whole / 20
    cell.feed(
        TaskStarted(
            node_id=orders[0].node_id, task_id=orders[0].task_id, token=job.token, pid=1, started_ms=1
        )
    )
    left = list(outstanding(cell.state, list(cell.state.nodes), job.token))
    assert len(left) == 255
    _named_once(left, 32)
    small = CellDriver(PlacerSettings(profile="fifo"))
    small.join(node_spec("n0", gpus=8))
    small.submit("small", job_spec(workers=8))
    for order in start_orders(small.state, "small", small.job("small").token):
        assert (len(order.peers), order.peers_of) == (8, None)


def _named_once(orders: list[Any], nodes: int) -> None:
    """The first order to each node has all peers; the others there name it."""
    first: dict[str, str] = {}
    for order in orders:
        assert order.peers == ()
        assert order.peers_of == first.setdefault(order.node_id, order.task_id)
        if order.peers_of != order.task_id:
            assert order.packed_peers is None
        else:
            assert len(unpack_peers(order.packed_peers)) == 256
    assert len(first) == nodes


def test_a_gang_with_a_task_on_each_node_is_few_bytes_of_orders() -> None:
    """128 members on 128 nodes: each order has all peers, packed. (512 on 512 would be 19 MiB as they
    are.)"""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    for number in range(128):
        spec = node_spec(f"gpu-node-{number:04d}", gpus=1, cores=1)
        cell.join(replace(spec, address=f"10.0.0.{number}"))
    cell.submit("large", job_spec(workers=128), estimate(1, cores=1, memory_mib=64))
    job = cell.job("large")
    assert len({task.place.node_id for task in job.tasks.values()}) == 128
    orders = start_orders(cell.state, "large", job.token)
    peers = unpack_peers(orders[0].packed_peers or "")
    whole = sum(len(encode(replace(order, peers=peers, packed_peers=None))) for order in orders)
    assert sum(len(encode(order)) for order in orders) < whole / 4
    repeated = outstanding(cell.state, list(cell.state.nodes), job.token)
    assert {order.task_id: order for order in repeated} == {order.task_id: order for order in orders}
    assert [(peer.rank, peer.node_id) for peer in peers] == [
        (task.place.rank, task.place.node_id) for task in job.tasks.values()
    ]


@pytest.mark.parametrize(
    "packed",
    ["", "?", "AAAA", pack_peers(())[:-8], b64encode(compress(b"{}")).decode(), TOO_MUCH],
    ids=["empty", "no base64", "no zlib", "cut", "no peers", "too many"],
)
def test_packed_peers_that_cannot_be_read(packed: str) -> None:
    with pytest.raises(ValueError, match="packed_peers"):
        unpack_peers(packed)
