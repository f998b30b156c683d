"""Parts of a job as submitted: the resources of a worker, retries, programs, nodes."""

from typing import Annotated

from msgspec import Meta

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


class ResourceRequest(Value, frozen=True, kw_only=True):
    """Resources that the user requested, per worker; each field may be left to the estimator."""

    OMITTED = ("gpu_share_milli",)

    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS_PER_NODE)] | None = None
    cores: Annotated[int, Meta(ge=1, le=MAX_CORES_PER_NODE)] | None = None
    host_memory_mib: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    gpu_memory_mib: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    bandwidth_mbps: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    gpu_share_milli: GpuShare | None = None
    """Share of one GPU; without `gpus` one GPU is meant."""

    def __post_init__(self) -> None:
        if self.gpu_share_milli is not None and self.gpus is not None:
            shares_one_gpu(self.gpu_share_milli, self.gpus)


class RetryPolicy(Value, frozen=True, kw_only=True):
    """How often a failed job is tried again. Back-off doubles from `backoff_ms` up to `backoff_max_ms`."""

    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 1
    backoff_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 1_000
    backoff_max_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 60_000


class Environment(Value, frozen=True, kw_only=True):
    """Where a task's programs come from besides its node's own PATH: exactly one of these."""

    OMITTED = ("venv", "conda", "container")

    venv: ShortText | None = None
    """Absolute folder of a Python virtual environment on the node."""
    conda: ShortText | None = None
    """Absolute prefix of a conda environment on the node, or its name there."""
    container: ShortText | None = None
    """Image, as podman or apptainer on the node takes it."""

    def __post_init__(self) -> None:
        one_environment(self.venv, self.conda, self.container)


class NodeChoice(Value, frozen=True, kw_only=True):
    """Nodes on which a job may run, by id or label; `rack=…` and `domain=…` are labels of every node."""

    OMITTED = ("only", "exclude", "prefer")

    only: NodeTerms = ()
    """It runs on nodes with any of these; empty: on all."""
    exclude: NodeTerms = ()
    """It runs on no node with any of these."""
    prefer: NodeTerms = ()
    """It starts on nodes with any of these where it fits there now, else elsewhere."""
