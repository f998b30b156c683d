"""Nodes and their GPUs, as a node-reporter describes its machine."""

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    GpuIndex,
    Identifier,
    ShortText,
    Value,
)

MAX_NODE_LABELS = 32


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU of a node, identified by its UUID."""

    index: GpuIndex
    """Present index in NVML: it may change with a restart, a repair or a setting of the driver."""
    uuid: Identifier
    model: Identifier
    memory_mib: Annotated[int, Meta(ge=1, le=1 << 30)]


Fault = Literal["xid", "ecc", "fell_off_bus", "thermal"]


class GpuFault(Value, frozen=True, kw_only=True):
    """A GPU that has failed since its machine booted, and was not repaired."""

    uuid: Identifier
    fault: Fault
    code: Annotated[int, Meta(ge=0)] = 0


BandwidthCap = Literal["resctrl", "cpu_quota", "none"]
"""How the memory bandwidth of a task is capped. `resctrl`: by the processor; `cpu_quota`: by the time for
which its cores work, so a cap is a percentage of that time; `none`: it cannot be."""


class Isolation(Value, frozen=True, kw_only=True):
    """Isolation of tasks that a node enforces, as its reporter found by testing it."""

    OMITTED = ("reason", "memory", "cores", "devices", "user", "bandwidth", "tmp", "processes")

    exits: Literal["pid_namespace", "cgroup", "none"]
    """How the end of all processes of a task is proven. `none`: a process that evades detection may outlive
    its task, so a GPU has only one task."""
    files: bool
    """A task sees neither the reporter's folders nor other processes,
    and cannot write records in its shim's name."""
    reason: ShortText = ""
    """Why no better isolation is available."""
    memory: Literal["task", "process"] = "process"
    """What the memory cap limits: all processes of a task together, or each of them."""
    cores: Literal["cpuset", "affinity"] = "affinity"
    """`affinity`: a task can widen it."""
    devices: Literal["cgroup", "hint"] = "hint"
    """`cgroup`: a task can open only its own GPUs and no disk; `hint`: CUDA_VISIBLE_DEVICES, which a program
    can ignore."""
    user: ShortText = ""
    """User that jobs run as; empty: not reported."""
    bandwidth: BandwidthCap = "none"
    """How the memory bandwidth of a task is capped. `resctrl`: by the processor; `cpu_quota`: by the time for
    which its cores work, so a cap is a percentage of that time."""

    tmp: Literal["task", "node"] = "node"
    """`task`: each task has a /tmp and a /dev/shm of its own, in its memory, that end with it; `node`: the
    machine's, where its files stay."""
    processes: Literal["limited", "unlimited"] = "unlimited"
    """Whether the number of a task's processes and threads is limited."""


class Measures(Value, frozen=True, kw_only=True):
    """Measurements of contention between tasks that a node supports,
    as its reporter found by testing them."""

    OMITTED = ("memory_mb_s",)

    contention: Literal["pressure", "schedstat", "none"]
    """How tasks that wait for cores are detected. `pressure`: by the kernel's triggers (PSI); `schedstat`: by
    the waiting time of their threads, polled while they run."""
    memory_bandwidth: Literal["resctrl", "none"]
    """`resctrl`: memory traffic is counted (MBM)."""
    memory_mb_s: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    """Bandwidth of the node's memory, as set by its operator; None: traffic is in percent of the largest
    measured, at least 20,000 MB/s."""


class LogServer(Value, frozen=True, kw_only=True):
    """Server of a node-reporter for its tasks' output, at the node's address."""

    OMITTED = ("tls",)

    port: Annotated[int, Meta(ge=1, le=65_535)]
    key: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """Id of the secret that authenticates requests (`penstock.runtime.keys.log_keys`)."""
    tls: bool = False


class NodeSpec(Value, frozen=True, kw_only=True):
    """A node as its reporter describes it."""

    OMITTED = ("machine_id", "isolation", "logs", "measures", "labels", "runs")

    node_id: Identifier
    machine_id: Identifier | None = None
    """Identifies the machine, independent of its node's id and of boots. None: not known."""
    boot_id: Identifier
    """Changes when the machine boots: processes of an older boot are proven dead (LAW 5)."""
    rack: Identifier = "rack-0"
    domain: Identifier = "domain-0"
    address: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    cores: Annotated[int, Meta(ge=1, le=MAX_CORES_PER_NODE)]
    host_memory_mib: Annotated[int, Meta(ge=1, le=1 << 30)]
    bandwidth_mbps: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    isolation: Isolation | None = None
    """None: not reported."""
    logs: LogServer | None = None
    """None: the node serves no output."""
    measures: Measures | None = None
    """None: not reported."""

    labels: Annotated[dict[Identifier, Identifier], Meta(max_length=MAX_NODE_LABELS)] = field(
        default_factory=dict
    )
    """Names and values of its operator's choice, by which jobs choose nodes (`JobSpec.nodes`)."""
    runs: Literal["programs", "images"] = "programs"
    """`images`: only jobs that name a container image, as pods of a Kubernetes cluster."""

    @property
    def labelled(self) -> tuple[str, ...]:
        """Its labels as `NAME=VALUE`, with `rack` and `domain`."""
        named = {**self.labels, "rack": self.rack, "domain": self.domain}
        return tuple(f"{name}={value}" for name, value in named.items())

    @property
    def terms(self) -> frozenset[str]:
        """All that a job may call the node."""
        return frozenset((self.node_id, *self.labelled))

    @property
    def shares_gpus(self) -> bool:
        """Whether several tasks may have a part of one GPU each."""
        return self.isolation is None or self.isolation.exits != "none"

    @property
    def bandwidth_cap(self) -> BandwidthCap:
        """See `Isolation.bandwidth`."""
        return "none" if self.isolation is None else self.isolation.bandwidth

    def __post_init__(self) -> None:
        if [gpu.index for gpu in self.gpus] != list(range(len(self.gpus))):
            raise ValueError("gpus: indexes must be 0, 1, 2, … in order")


JoinRefusal = Literal["stale_join", "other_machine", "gpu_of_another_node"]
"""`stale_join`: its incarnation is not above the last one. `other_machine`: another machine has this node id
and is not proven gone. `gpu_of_another_node`: one of its GPUs is in a node of another id that is not proven
gone."""
