"""A node as the cell sees it: what is left of it, and when nothing is."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.model.inputs.external_events import NodeJoined
from penstock_services.node_reporter.kubernetes.core import facts
from penstock_services.node_reporter.kubernetes.core.messages import Watched
from penstock_services.node_reporter.kubernetes.core.objects import (
    Container,
    Metadata,
    Node,
    Pod,
    PodSpec,
    PodStatus,
    Resources,
    Taint,
)
from penstock_services.node_reporter.kubernetes.core.state import TERM_SHIFT
from tests.unit.node_reporter.kubernetes.story import NOW_MS, OPTIONS, Told, node, start


def other(name: str, *, gpus: int = 0, cpu: str = "0", phase: str = "Running") -> Pod:
    """Somebody else's pod on node n1."""
    requests: dict[str, str | int | float] = {"nvidia.com/gpu": gpus, "cpu": cpu, "memory": "1Gi"}
    return Pod(
        metadata=Metadata(name=name, namespace="others", uid=name),
        spec=PodSpec(node_name="n1", containers=[Container(resources=Resources(requests=requests))]),
        status=PodStatus(phase=phase),
    )


def joined(told: Told) -> NodeJoined:
    (event,) = told.events()
    assert isinstance(event, NodeJoined)
    return event


def test_counted_gpus() -> None:
    """The device plugin says how many, not which."""
    event = joined(Told())
    assert [gpu.uuid for gpu in event.node.gpus] == ["k/n1:0", "k/n1:1", "k/n1:2", "k/n1:3"]
    assert {(gpu.model, gpu.memory_mib) for gpu in event.node.gpus} == {("NVIDIA-A100", 40_960)}
    assert not event.node.shares_gpus
    assert (event.node.cores, event.node.host_memory_mib) == (16, 65_536)
    assert (event.node.boot_id, event.node.machine_id) == ("b1", "m1")
    assert (event.incarnation, event.leases) == (1 << TERM_SHIFT | 1, False)
    assert msgspec.json.decode(msgspec.json.encode(event), type=NodeJoined) == event, (
        "it is valid on the wire"
    )


def test_pods_of_others_are_capacity_that_the_cell_does_not_have() -> None:
    told = Told(pods=(other("a", gpus=1, cpu="1500m"),))
    assert (len(joined(told).node.gpus), joined(told).node.cores) == (3, 14)
    told.feed(Watched("ADDED", other("b", gpus=2), NOW_MS))
    assert len(joined(told).node.gpus) == 1
    told.feed(
        Watched("MODIFIED", replace(other("b", gpus=2), metadata=Metadata("b", "others", "b", "9")), NOW_MS)
    )
    assert told.events() == [], "it holds what it held"
    told.feed(Watched("MODIFIED", other("b", gpus=2, phase="Succeeded"), NOW_MS))
    assert len(joined(told).node.gpus) == 3
    told.feed(Watched("DELETED", other("a", gpus=1), NOW_MS))
    assert len(joined(told).node.gpus) == 4


def test_a_held_gpu_keeps_its_name_when_others_take_some() -> None:
    """Else the cell would count the held GPU as gone and a taken one as free."""
    told = Told()
    told.created(start(gpus=(3,)))
    told.feed(Watched("ADDED", other("a", gpus=2), NOW_MS))
    assert [gpu.uuid for gpu in joined(told).node.gpus] == ["k/n1:0", "k/n1:3"]
    assert [task.task_id for task in joined(told).tasks] == ["j.1.w0"]


def test_a_heartbeat_is_no_event() -> None:
    told = Told()
    beat = replace(node(), metadata=replace(node().metadata, resource_version="77"))
    told.feed(Watched("MODIFIED", beat, NOW_MS))
    assert told.actions == []


TAINT = Taint(key="team", effect="NoSchedule")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (node(ready="Unknown"), "not-ready"),
        (replace(node(), spec=replace(node().spec, unschedulable=True)), "cordoned"),
        (replace(node(), spec=replace(node().spec, taints=[TAINT])), "taint/team"),
        (replace(node(), metadata=Metadata(name="n1")), "no-label/nvidia.com/gpu.memory"),
    ],
)
def test_a_closed_node_has_nothing(changed: Node, why: str) -> None:
    told = Told()
    told.feed(Watched("MODIFIED", changed, NOW_MS))
    spec = joined(told).node
    assert (spec.gpus, spec.cores, spec.host_memory_mib) == ((), 1, 1)
    assert spec.labels[facts.CLOSED_LABEL] == why
    told.feed(Watched("MODIFIED", node(), NOW_MS))
    assert len(joined(told).node.gpus) == 4


@pytest.mark.parametrize(
    "taint", [Taint(key="nvidia.com/gpu", effect="NoSchedule"), Taint("x", "PreferNoSchedule")]
)
def test_taints_that_do_not_close_a_node(taint: Taint) -> None:
    told = Told(replace(node(), spec=replace(node().spec, taints=[taint])))
    assert len(joined(told).node.gpus) == 4


def test_a_full_node() -> None:
    """The kubelet counts pods, too."""
    allocatable = {**node().status.allocatable, "pods": "1"}
    told = Told(replace(node(), status=replace(node().status, allocatable=allocatable)), pods=(other("a"),))
    assert joined(told).node.labels[facts.CLOSED_LABEL] == "pods-full"


@pytest.mark.parametrize("value", ["much", ""])
def test_a_quantity_that_cannot_be_read(value: Any) -> None:
    """A node of a broken device plugin does not end the reporter."""
    told = Told()
    allocatable = {**node().status.allocatable, "cpu": value}
    told.feed(
        Watched("MODIFIED", replace(node(), status=replace(node().status, allocatable=allocatable)), NOW_MS)
    )
    assert joined(told).node.labels[facts.CLOSED_LABEL] == "resources-unreadable"


def test_labels() -> None:
    """The operator's own, and the configured ones; not what no job can name."""
    found = {
        "penstock.dev/disk": "ssd",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": "n1",
        "penstock.dev/empty": "",
        "topology.kubernetes.io/rack": "r7",
        "topology.kubernetes.io/zone": "z1",
        **node().metadata.labels,
    }
    spec = joined(Told(replace(node(), metadata=Metadata(name="n1", labels=found)), options=OPTIONS)).node
    assert spec.labels == {
        "penstock.dev/disk": "ssd",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": "z1",
    }
    assert (spec.rack, spec.domain) == ("r7", "z1")
