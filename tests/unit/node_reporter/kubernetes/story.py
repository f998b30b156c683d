"""What the stories of the reporter's core are told with: nodes, pods, orders, and one session."""

from typing import Any

from msgspec.structs import replace

from penstock.model.decisions.orders import Order, StartTask, StopTask
from penstock.model.jobs.job_parts import Environment
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.kubernetes.core.messages import (
    Action,
    CreatePod,
    FenceRaised,
    Input,
    Listed,
    OrderRead,
    Watched,
    Write,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.objects import (
    Condition,
    ContainerState,
    ContainerStatus,
    Metadata,
    Node,
    NodeInfo,
    NodeStatus,
    Pod,
    State,
)
from penstock_services.node_reporter.kubernetes.core.reporter import begin, step
from penstock_services.node_reporter.kubernetes.core.state import TERM_SHIFT, Options
from tests.support.kubernetes.simulated_api import Json, pod_of

OPTIONS = Options(cluster="k", namespace="penstock", finished_pods=2)
NOW_MS = 1_800_000_000_000

BEGUN = {
    "phase": "Running",
    "container_statuses": [
        ContainerStatus(state=ContainerState(running=State(started_at="2026-01-01T00:00:10Z")))
    ],
}


def node(
    name: str = "n1", *, gpus: int = 4, boot: str = "b1", machine: str = "m1", ready: str = "True"
) -> Node:
    """A node of 16 cores, 64 GiB and these GPUs."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-A100", "nvidia.com/gpu.memory": "40960"}
    return Node(
        metadata=Metadata(name=name, labels=labels),
        status=NodeStatus(
            allocatable={"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": str(gpus), "pods": "110"},
            conditions=[Condition(type="Ready", status=ready)],
            node_info=NodeInfo(boot_id=boot, machine_id=machine),
        ),
    )


def start(task_id: str = "j.1.w0", token: int = 5, *, gpus: tuple[int, ...] = (0,), **more: Any) -> StartTask:
    """A start order for one worker on node `k/n1`, of the first joining of term 1."""
    job_id, attempt, _ = task_id.rsplit(".", 2)
    place = TaskPlacement(
        task_id=task_id,
        role="worker",
        rank=0,
        node_id="k/n1",
        gpus=gpus,
        cores=(0, 1),
        host_memory_mib=more.pop("host_memory_mib", 1_024),
        gpu_share_milli=more.pop("gpu_share_milli", 1_000),
    )
    fields: dict[str, Any] = {
        "token": token,
        "node_id": "k/n1",
        "task_id": task_id,
        "job_id": job_id,
        "attempt": int(attempt),
        "boot_id": "b1",
        "incarnation": 1 << TERM_SHIFT | 1,
        "command": ("python", "train.py"),
        "environment": Environment(container="registry/train:1"),
        "place": place,
        "gpu_uuids": tuple(f"k/n1:{gpu}" for gpu in gpus),
        "peers": (),
        "rendezvous_port": 29_500,
        "grace_ms": 2_500,
    }
    return StartTask(**{**fields, **more})


def stop(
    task_id: str = "j.1.w0", token: int = 9, grace_ms: int = 2_500, reason: str = "cancelled"
) -> StopTask:
    return StopTask(token=token, node_id="k/n1", task_id=task_id, grace_ms=grace_ms, reason=reason)


class Told:
    """One session; `pods`: what the API server has, by name."""

    def __init__(
        self, *nodes: Node, pods: tuple[Pod, ...] = (), term: int = 1, options: Options = OPTIONS
    ) -> None:
        self.state, self.actions = begin(options)
        self.now_ms = NOW_MS
        self.versions = 100
        self.feed(FenceRaised(term, NOW_MS))
        self.feed(Listed(nodes or (node(),), "nodes", NOW_MS))
        self.feed(Listed(pods, "pods", NOW_MS))

    def feed(self, given: Input) -> list[Action]:
        self.actions = step(self.state, given)
        return self.actions

    def order(self, order: Order) -> list[Action]:
        return self.feed(OrderRead(order, self.now_ms))

    def events(self) -> list[Event]:
        """Emitted by the latest step."""
        return [action.event for action in self.actions if isinstance(action, Emit)]

    def writes(self) -> list[Write]:
        """Asked for by the latest step."""
        return [action for action in self.actions if isinstance(action, Write)]

    def notes(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, Note)]

    def wrote(self, write: Any, outcome: Any, pod: Pod | None = None, text: str = "") -> list[Action]:
        return self.feed(Wrote(write=write, outcome=outcome, pod=pod, text=text, now_ms=self.now_ms))

    def created(self, order: StartTask, uid: str = "u1") -> Pod:
        """The order is obeyed and the pod exists."""
        self.order(order)
        (write,) = self.writes()
        assert isinstance(write, CreatePod)
        pod = self.made(write.manifest, uid)
        self.wrote(write, "done", pod)
        return pod

    def barred(self) -> list[Event]:
        """Takes the name that the latest step asks to take; the events that follow."""
        (write,) = self.writes()
        assert isinstance(write, CreatePod)
        assert "nodeName" not in write.manifest["spec"]
        assert self.events() == []
        self.wrote(write, "done", self.made(write.manifest, "barred"))
        return self.events()

    def made(self, manifest: Json, uid: str) -> Pod:
        """The pod as the API server stores it."""
        self.versions += 1
        pod = pod_of(manifest)
        return replace(pod, metadata=replace(pod.metadata, uid=uid, resource_version=str(self.versions)))

    def see(self, pod: Pod, *, change: Any = "MODIFIED", deleting: bool = False, **status: Any) -> Pod:
        """The pod has this status now; `deleting`: somebody has deleted it."""
        self.versions += 1
        stamp = "2026-01-01T00:01:00Z" if deleting else pod.metadata.deletion_timestamp
        metadata = replace(pod.metadata, resource_version=str(self.versions), deletion_timestamp=stamp)
        pod = replace(pod, metadata=metadata, status=replace(pod.status, **status))
        self.feed(Watched(change, pod, self.now_ms))
        return pod


def over(code: int = 0, reason: str = "") -> dict[str, Any]:
    """The status of a pod whose container has ended."""
    state = State(
        exit_code=code, reason=reason, started_at="2026-01-01T00:00:10Z", finished_at="2026-01-01T00:00:30Z"
    )
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "container_statuses": [ContainerStatus(state=ContainerState(terminated=state))]}


def kinds(told: Told) -> list[str]:
    """Of the latest step's events and writes."""
    return [type(found).__name__ for found in (*told.events(), *told.writes())]
