"""Pydantic models of the job file's sections (resources, retry, environment, workers), and its fields with
human units."""

import re
from collections.abc import Mapping
from typing import Annotated, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo

from penstock.model.jobs.job_parts import Environment
from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    MAX_WORKERS,
    Identifier,
    NodeTerm,
    ShortText,
)
from penstock.model.schema.validation import constraint
from penstock.sdk.job_file.units import (
    DURATION_PATTERN,
    MBIT_PER_UNIT,
    MEMORY_PATTERN,
    MIB_PER_UNIT,
    MS_PER_UNIT,
    RATE_PATTERN,
    duration_ms,
    memory_mib,
    rate_mbps,
)


def _written(pattern: str, example: str, plain: str) -> WithJsonSchema:
    """JSON Schema of a field with a unit, for editors."""
    text = {"type": "string", "pattern": pattern, "examples": [example]}
    return WithJsonSchema({"anyOf": [text, {"type": "number", "minimum": 0, "description": plain}]})


Name = Annotated[str, constraint(get_args(Identifier)[1])]


LISTED_GPU = re.compile(r"\s*GPU [0-9]+: (.+?) \(UUID: [^()]*\)\s*")
"""A line of `nvidia-smi -L`."""


def _without_blanks(name: object) -> object:
    if not isinstance(name, str):
        return name
    listed = LISTED_GPU.fullmatch(name)
    return "-".join((listed[1] if listed else name).split())


GpuName = Annotated[str, BeforeValidator(_without_blanks), constraint(get_args(Identifier)[1])]
"""A GPU's model, also as nvidia-smi shows it, with blanks."""
Text = Annotated[str, constraint(get_args(ShortText)[1])]
Term = Annotated[str, constraint(get_args(NodeTerm)[1])]
Duration = Annotated[int, BeforeValidator(duration_ms), _written(DURATION_PATTERN, "10m", "seconds")]
Memory = Annotated[int, BeforeValidator(memory_mib), _written(MEMORY_PATTERN, "8GiB", "MiB")]
Rate = Annotated[int, BeforeValidator(rate_mbps), _written(RATE_PATTERN, "10Gbit", "Mbit/s")]
_UNITS: Mapping[object, Mapping[str, int]] = {
    duration_ms: MS_PER_UNIT,
    memory_mib: MIB_PER_UNIT,
    rate_mbps: MBIT_PER_UNIT,
}


class Section(BaseModel):
    """Numbers must be written as numbers and text as text: `strict`. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Resources(Section):
    """Resources of each worker. Every field may be left out: Penstock then estimates it."""

    gpus: int | None = Field(
        None, ge=0, le=MAX_GPUS_PER_NODE, description="GPUs per worker; 0 for none.", examples=[1]
    )
    gpu_share: float | None = Field(
        None,
        ge=0.001,
        le=1,
        description="Share of one GPU, for small jobs that run side by side.",
        examples=[0.5],
    )
    cores: int | None = Field(
        None, ge=1, le=MAX_CORES_PER_NODE, description="CPU cores per worker.", examples=[4]
    )
    host_memory: Memory | None = Field(
        None, ge=1, le=1 << 30, description="Main memory per worker.", examples=["8GiB"]
    )
    gpu_memory: Memory | None = Field(
        None, ge=1, le=1 << 30, description="Memory on each of its GPUs.", examples=["10GiB"]
    )
    bandwidth: Rate | None = Field(
        None, ge=0, le=10_000_000, description="Network bandwidth per worker.", examples=["10Gbit"]
    )

    @model_validator(mode="after")
    def _shares_one_gpu(self) -> Self:
        if self.gpu_share not in (None, 1) and self.gpus not in (None, 1):
            raise ValueError(f"gpu_share {self.gpu_share} needs gpus 1; ask for one GPU or for whole ones")
        return self


class Retry(Section):
    """How often a failed job is tried again."""

    max_attempts: int = Field(1, ge=1, le=100, description="Attempts in all; 1: no retry.", examples=[3])
    backoff: Duration = Field(
        1_000, le=3_600_000, description="Wait before the second attempt; doubles each time.", examples=["5s"]
    )
    backoff_max: Duration = Field(
        60_000, le=86_400_000, description="The longest wait between attempts.", examples=["1m"]
    )


class Nodes(Section):
    """Nodes on which the job may run, each by its name or as `LABEL=VALUE`, or by several of these that must
    all hold, joined by `&`.

    `rack=…` and `domain=…` are labels of every node.
    """

    only: list[Term] = Field(
        default_factory=list,
        max_length=64,
        description="It runs on nodes with any of these; empty: on all.",
        examples=[["node-1", "disk=ssd"]],
    )
    exclude: list[Term] = Field(
        default_factory=list,
        max_length=64,
        description="It runs on no node with any of these.",
        examples=[["node-7"]],
    )
    prefer: list[Term] = Field(
        default_factory=list,
        max_length=64,
        description="It starts on nodes with any of these where it fits there now, else elsewhere.",
        examples=[["rack=rack-0"]],
    )


class Programs(Section):
    """Where Python and other programs come from: exactly one of these fields; `path`, the default: the node's
    own PATH."""

    venv: Text | None = Field(
        None,
        description="Folder of a Python virtual environment, on each node; relative to the job file.",
        examples=["/srv/envs/resnet"],
    )
    conda: Text | None = Field(
        None, description="Prefix of a conda environment on each node, or its name there.", examples=["torch"]
    )
    container: Text | None = Field(
        None,
        description="Image, run by podman or apptainer on the node.",
        examples=["docker.io/pytorch/pytorch"],
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        self.asked()
        return self

    def asked(self) -> Environment:
        """Raises `ValueError`."""
        return Environment(venv=self.venv, conda=self.conda, container=self.container)


class Workers(Section):
    """A range of worker counts: each attempt starts with a number for which there is room. Such a job has a
    `global_batch_size` and no parameter servers."""

    min: int = Field(1, ge=1, le=MAX_WORKERS, description="Minimum number of workers.", examples=[1])
    max: int = Field(ge=1, le=MAX_WORKERS, description="Maximum number of workers.", examples=[8])


def form_of_workers(given: object) -> str:
    return RANGE if isinstance(given, Mapping | Workers) else NUMBER


NUMBER, RANGE = "number", "range"
"""The two forms of `workers`: tags that no message shows."""


def units_of(info: FieldInfo) -> Mapping[str, int] | None:
    """The units that a field may be written in; None for a field without units."""
    marks = [*info.metadata, *(mark for kind in get_args(info.annotation) for mark in get_args(kind))]
    readers = (mark.func for mark in marks if isinstance(mark, BeforeValidator))
    return next((_UNITS[reader] for reader in readers if reader in _UNITS), None)


def with_references(fields: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The fields with values `{secret: NAME}` of `env` moved to `secrets`,
    and the names that `secrets` has already."""
    env, secrets = fields.get("env"), fields.get("secrets", {})
    if not isinstance(env, Mapping) or not isinstance(secrets, Mapping):
        return fields, []
    named = {
        name: found["secret"]
        for name, found in env.items()
        if isinstance(found, Mapping) and [*found] == ["secret"]
    }
    if not named:
        return fields, []
    plain = {name: found for name, found in env.items() if name not in named}
    twice = [name for name in named if name in secrets]
    return {**fields, "env": plain, "secrets": {**secrets, **named}}, twice
