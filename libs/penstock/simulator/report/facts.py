"""The facts that a picture needs, decoded to their few fields that matter here; other facts are passed over."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from penstock.model import external_events, ledger_events
from penstock.model.event import wire_type
from penstock.model.types import WHOLE_GPU


class Request(msgspec.Struct):
    gpus: int | None = None
    gpu_share_milli: int | None = None


class Spec(msgspec.Struct):
    name: str = "job"
    owner: str = "unknown"
    workers: int = 1
    model: str | None = None
    resources: Request = msgspec.field(default_factory=Request)


class Vector(msgspec.Struct):
    gpus: int = 0
    gpu_share_milli: int = WHOLE_GPU


class Needs(msgspec.Struct):
    worker: Vector


class Device(msgspec.Struct):
    index: int


class Inventory(msgspec.Struct):
    node_id: str
    gpus: tuple[Device, ...] = ()


class Place(msgspec.Struct):
    task_id: str
    node_id: str
    gpus: tuple[int, ...] = ()
    gpu_share_milli: int = WHOLE_GPU


class Submitted(msgspec.Struct):
    job_id: str
    spec: Spec


class Estimated(msgspec.Struct):
    job_id: str
    estimate: Needs


class Joined(msgspec.Struct):
    node: Inventory


class Placed(msgspec.Struct):
    job_id: str
    attempt: int
    tasks: tuple[Place, ...]


class OfTask(msgspec.Struct):
    task_id: str


class OfJob(msgspec.Struct):
    job_id: str


class Requeued(msgspec.Struct):
    job_id: str
    not_before_ms: int | None = None


class Unschedulable(msgspec.Struct):
    job_id: str
    reason: str = ""


class Ended(msgspec.Struct):
    job_id: str
    outcome: str


class OfNode(msgspec.Struct):
    node_id: str


class Faulted(msgspec.Struct):
    node_id: str
    gpu: int


class Settings(msgspec.Struct):
    profile: str = ""
    seed: int = 0


class Term(msgspec.Struct):
    settings: Settings


Fact = (
    Submitted | Estimated | Joined | Placed | OfTask | OfJob | Requeued | Unschedulable | Ended | OfNode | Faulted | Term
)  # fmt: skip

SHAPES: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        wire_type(external_events.JobSubmitted): Submitted,
        wire_type(external_events.JobEstimated): Estimated,
        wire_type(external_events.NodeJoined): Joined,
        wire_type(external_events.NodeChanged): Joined,
        wire_type(external_events.NodeSuspected): OfNode,
        wire_type(external_events.NodeLeft): OfNode,
        wire_type(external_events.GpuFaulted): Faulted,
        wire_type(external_events.TaskStarted): OfTask,
        wire_type(external_events.TaskExited): OfTask,
        wire_type(external_events.OrderRefused): OfTask,
        wire_type(ledger_events.TaskLost): OfTask,
        wire_type(ledger_events.NodeLost): OfNode,
        wire_type(ledger_events.NodeRestored): OfNode,
        wire_type(ledger_events.PlacementDecided): Placed,
        wire_type(ledger_events.StopDecided): OfJob,
        wire_type(ledger_events.JobPreempted): OfJob,
        wire_type(ledger_events.JobQueued): OfJob,
        wire_type(ledger_events.JobRequeued): Requeued,
        wire_type(ledger_events.JobFoundUnschedulable): Unschedulable,
        wire_type(ledger_events.JobEnded): Ended,
        wire_type(ledger_events.TermStarted): Term,
    }
)

DECODE: Mapping[str, Callable[[msgspec.Raw], msgspec.Struct]] = MappingProxyType(
    {kind: msgspec.json.Decoder(shape).decode for kind, shape in SHAPES.items()}
)
