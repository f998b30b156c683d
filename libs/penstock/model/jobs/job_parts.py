"""Parts of a job as submitted: the resources of a worker, retries, programs, nodes."""

from typing import Annotated

from msgspec import Meta

from penstock.model.jobs.job_fields import Key
from penstock.model.nouns.process_rules import one_environment
from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    GpuShare,
    NodeTerms,
    ShortText,
    Value,
    shares_one_gpu,
)

MAX_ATTEMPTS = 100
NODE = "NODE|LABEL=VALUE"


class ResourceRequest(Value, frozen=True, kw_only=True):
    """Resources that the user requested, per worker; each field may be left to the estimator."""

    OMITTED = ("gpu_share_milli",)

    gpus: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_GPUS_PER_NODE)] | None,
        Key("GPUs per worker; 0 for none.", 1, "GPUs per worker; estimated if left out, like all resources."),
    ] = None
    cores: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CORES_PER_NODE)] | None, Key("CPU cores per worker.", 4)
    ] = None
    host_memory_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None, Key("Main memory per worker.", "8GiB")
    ] = None
    gpu_memory_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None,
        Key("Memory on each of its GPUs.", "10GiB", "Memory on each GPU."),
    ] = None
    bandwidth_mbps: Annotated[
        Annotated[int, Meta(ge=0, le=10_000_000)] | None, Key("Network bandwidth per worker.", "10Gbit")
    ] = None
    gpu_share_milli: Annotated[
        GpuShare | None,
        Key("Share of one GPU, for small jobs that run side by side.", 0.5, None, after="gpus"),
    ] = None
    """Share of one GPU; without `gpus` one GPU is meant."""

    def __post_init__(self) -> None:
        if self.gpu_share_milli is not None and self.gpus is not None:
            shares_one_gpu(self.gpu_share_milli, self.gpus)


class RetryPolicy(Value, frozen=True, kw_only=True):
    """How often a failed job is tried again. Back-off doubles from `backoff_ms` up to `backoff_max_ms`."""

    max_attempts: Annotated[
        int,
        Meta(ge=1, le=MAX_ATTEMPTS),
        Key("Attempts in all; 1: no retry.", 3, "Attempts in all if the job fails."),
    ] = 1
    backoff_ms: Annotated[
        int, Meta(ge=0, le=3_600_000), Key("Wait before the second attempt; doubles each time.", "5s", None)
    ] = 1_000
    backoff_max_ms: Annotated[
        int, Meta(ge=0, le=86_400_000), Key("The longest wait between attempts.", "1m", None)
    ] = 60_000


class Environment(Value, frozen=True, kw_only=True):
    """Where a task's programs come from besides its node's own PATH: exactly one of these."""

    OMITTED = ("venv", "conda", "container")

    venv: Annotated[
        ShortText | None,
        Key(
            "Folder of a Python virtual environment, on each node; relative to the job file.",
            "/srv/envs/resnet",
            "Python virtual environment to run in, on each node.",
            metavar="DIR",
        ),
    ] = None
    """Absolute folder of a Python virtual environment on the node."""
    conda: Annotated[
        ShortText | None,
        Key(
            "Prefix of a conda environment on each node, or its name there.",
            "torch",
            "Conda environment to run in, on each node.",
            metavar="NAME|PREFIX",
        ),
    ] = None
    """Absolute prefix of a conda environment on the node, or its name there."""
    container: Annotated[
        ShortText | None,
        Key(
            "Image, run by podman or apptainer on the node.",
            "docker.io/pytorch/pytorch",
            "Image to run in, by podman or apptainer on the nodes.",
            metavar="IMAGE",
        ),
    ] = None
    """Image, as podman or apptainer on the node takes it."""

    def __post_init__(self) -> None:
        one_environment(self.venv, self.conda, self.container)


class NodeChoice(Value, frozen=True, kw_only=True):
    """Nodes on which a job may run, by id or label; `rack=…` and `domain=…` are labels of every node."""

    OMITTED = ("only", "exclude", "prefer")

    only: Annotated[
        NodeTerms,
        Key(
            "It runs on nodes with any of these; empty: on all.",
            ["node-1", "disk=ssd"],
            "Run on these nodes alone; may be repeated.",
            options=("--only-node",),
            metavar=NODE,
        ),
    ] = ()
    """It runs on nodes with any of these; empty: on all."""
    exclude: Annotated[
        NodeTerms,
        Key(
            "It runs on no node with any of these.",
            ["node-7"],
            "Run on none of these nodes; may be repeated.",
            options=("--exclude-node",),
            metavar=NODE,
        ),
    ] = ()
    """It runs on no node with any of these."""
    prefer: Annotated[
        NodeTerms,
        Key(
            "It starts on nodes with any of these where it fits there now, else elsewhere.",
            ["rack=rack-0"],
            "Start on these nodes where it fits there; may be repeated.",
            options=("--prefer-node",),
            metavar=NODE,
        ),
    ] = ()
    """It starts on nodes with any of these where it fits there now, else elsewhere."""
