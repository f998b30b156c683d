"""Kubernetes objects as this reporter reads them: only the fields that it uses, decoded from raw JSON.

Unknown fields are skipped by the decoder, so that an event costs microseconds (a library's models: 388 µs,
measured on this project's machines). Missing fields have their API defaults.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, field


class _Object(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base: JSON names are in camel case."""


class Owner(_Object, frozen=True):
    """A reference to the object that owns this one."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Metadata(_Object, frozen=True):
    """Metadata that every object has. Times are RFC 3339 texts, of the API server's clock."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: list[str] = field(default_factory=list)
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    owner_references: list[Owner] = field(default_factory=list)


class Resources(_Object, frozen=True):
    """Quantities by resource name, as text (`500m`, `1Gi`) or number."""

    requests: dict[str, str | int | float] = field(default_factory=dict)
    limits: dict[str, str | int | float] = field(default_factory=dict)


class Port(_Object, frozen=True):
    """A port of a container; `host_port` 0: none on the node."""

    container_port: int = 0
    host_port: int = 0


class Container(_Object, frozen=True):
    """A container of a pod. `restart_policy` `Always` on an init container: it runs beside the others."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None
    ports: list[Port] = field(default_factory=list)


class Gate(_Object, frozen=True):
    """A scheduling gate: the pod may not be placed yet."""

    name: str = ""


class PodSpec(_Object, frozen=True):
    """What a pod asks for, and its node."""

    node_name: str = ""
    containers: list[Container] = field(default_factory=list)
    init_containers: list[Container] = field(default_factory=list)
    overhead: dict[str, str | int | float] = field(default_factory=dict)
    resources: Resources = Resources()
    """Of the pod as a whole (`PodLevelResources`)."""
    scheduling_gates: list[Gate] = field(default_factory=list)


class Running(_Object, frozen=True):
    """A container that runs."""

    started_at: str | None = None


class Terminated(_Object, frozen=True):
    """A container that has ended, as its kubelet reports."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class Waiting(_Object, frozen=True):
    """A container that has not started yet, and why."""

    reason: str = ""
    message: str = ""


class ContainerState(_Object, frozen=True):
    """At most one of these; none: waiting without a reason."""

    running: Running | None = None
    terminated: Terminated | None = None
    waiting: Waiting | None = None


class ContainerStatus(_Object, frozen=True):
    """State of a container."""

    name: str = ""
    state: ContainerState = ContainerState()


class Condition(_Object, frozen=True):
    """A condition of a node or pod; `status` is `True`, `False` or `Unknown`."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodStatus(_Object, frozen=True):
    """What is known of a pod's containers. `phase`: Pending, Running, Succeeded, Failed or Unknown."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = field(default_factory=list)
    container_statuses: list[ContainerStatus] = field(default_factory=list)
    init_container_statuses: list[ContainerStatus] = field(default_factory=list)


class Pod(_Object, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def key(self) -> str:
        """`NAMESPACE/NAME`: unique at one moment; over time only `metadata.uid` is."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def terminal(self) -> bool:
        """Whether its phase is final; by itself no proof that its containers have ended (`proof`)."""
        return self.status.phase in ("Succeeded", "Failed")


class Taint(_Object, frozen=True):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSection(_Object, frozen=True):
    """A node's specification."""

    unschedulable: bool = False
    taints: list[Taint] = field(default_factory=list)


class NodeInfo(_Object, frozen=True):
    """Identity of the machine and of its boot."""

    boot_id: Annotated[str, Meta(max_length=256)] = field(default="", name="bootID")
    machine_id: Annotated[str, Meta(max_length=256)] = field(default="", name="machineID")


class Address(_Object, frozen=True):
    """An address of a node; `type`: InternalIP, Hostname, …"""

    type: str = ""
    address: str = ""


class NodeStatus(_Object, frozen=True):
    """What a node's kubelet reports."""

    allocatable: dict[str, str | int | float] = field(default_factory=dict)
    capacity: dict[str, str | int | float] = field(default_factory=dict)
    conditions: list[Condition] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    node_info: NodeInfo = NodeInfo()


class Node(_Object, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSection = NodeSection()
    status: NodeStatus = NodeStatus()


def newer(known: Metadata, found: Metadata) -> bool:
    """Whether `found` is not an older version of the same object. Versions are decimal numbers that grow
    (documented as comparable from Kubernetes 1.35, true of etcd before); others count as newer."""
    if known.uid != found.uid:
        return True
    versions = known.resource_version, found.resource_version
    return not all(map(str.isdecimal, versions)) or int(versions[1]) >= int(versions[0])
