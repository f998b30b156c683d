"""Pydantic models of the job file's sections (resources, retry, environment, workers), and its fields with
human units."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args

from msgspec import NODEFAULT, Meta
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from penstock.model.jobs.job_fields import JobField, job_fields
from penstock.model.jobs.job_parts import Environment, NodeChoice, ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_WORKERS, WHOLE_GPU, Identifier, Value
from penstock.model.schema.validation import constraint, hint_of
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


LISTED_GPU = re.compile(r"\s*GPU [0-9]+: (.+?) \(UUID: [^()]*\)\s*")
"""A line of `nvidia-smi -L`."""


def _without_blanks(name: object) -> object:
    if not isinstance(name, str):
        return name
    listed = LISTED_GPU.fullmatch(name)
    return "-".join((listed[1] if listed else name).split())


GpuName = Annotated[str, BeforeValidator(_without_blanks), constraint(get_args(Identifier)[1])]
"""A GPU's model, also as nvidia-smi shows it, with blanks."""
Duration = Annotated[int, BeforeValidator(duration_ms), _written(DURATION_PATTERN, "10m", "seconds")]
Memory = Annotated[int, BeforeValidator(memory_mib), _written(MEMORY_PATTERN, "8GiB", "MiB")]
Rate = Annotated[int, BeforeValidator(rate_mbps), _written(RATE_PATTERN, "10Gbit", "Mbit/s")]


class Unit(NamedTuple):
    """How a job file has a field with a unit."""

    kind: Any
    sizes: Mapping[str, int]
    """Name of a unit → how much it is."""


UNITS: Mapping[str, Unit] = MappingProxyType(
    {
        "_ms": Unit(Duration, MS_PER_UNIT),
        "_mib": Unit(Memory, MIB_PER_UNIT),
        "_mbps": Unit(Rate, MBIT_PER_UNIT),
    }
)
"""By the end of the field's name."""


class Section(BaseModel):
    """Numbers must be written as numbers and text as text: `strict`. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Resources(Section):
    """Resources of each worker. Every field may be left out: Penstock then estimates it."""

    @model_validator(mode="after")
    def _shares_one_gpu(self: Any) -> Any:
        if self.gpu_share not in (None, 1) and self.gpus not in (None, 1):
            raise ValueError(f"gpu_share {self.gpu_share} needs gpus 1; ask for one GPU or for whole ones")
        return self


class _Retry(Section):
    """How often a failed job is tried again."""


class _Nodes(Section):
    """Nodes on which the job may run, each by its name or as `LABEL=VALUE`, or by several of these that must
    all hold, joined by `&`.

    `rack=…` and `domain=…` are labels of every node.
    """


class _Programs(Section):
    """Where Python and other programs come from: exactly one of these fields; `path`, the default: the node's
    own PATH."""

    @model_validator(mode="after")
    def _is_one(self: Any) -> Any:
        Environment(venv=self.venv, conda=self.conda, container=self.container)
        return self


SECTIONS: dict[type[Value], type[Section]] = {}
"""Part of a job → the model of its section, once that is made."""


def section_model(
    base: type[Section], kind: type[Value], written: Mapping[str, Any] = MappingProxyType({})
) -> type[Section]:
    """The model of a section: the fields of a part of a job, in their order. `written`: key → type, where a
    job file has another one than the job."""
    found: dict[str, Any] = {}
    for field in job_fields(kind):
        if field.section or not field.about.help:
            continue
        hint, more = written.get(field.key) or _file_type(field), _bounds(field)
        if field.default in ((), {}):
            more["default_factory"] = list if field.default == () else dict
        elif isinstance(field.default, Value):
            more["default"] = SECTIONS[type(field.default)]()
        elif field.default is not NODEFAULT:
            more["default"] = field.default
        info = Field(**more, description=field.about.help, examples=field.examples or None)
        found[field.key] = (hint | None if field.default is None else hint, info)
    return create_model(base.__name__.lstrip("_"), __base__=base, __doc__=base.__doc__, **found)


def _file_type(field: JobField) -> Any:
    """A field's type as a job file has it: with human units, and lists in place of tuples."""
    if not field.unit:
        return hint_of(field.kind, SECTIONS.__getitem__, lists=True)
    return UNITS[field.unit].kind if field.unit in UNITS else float


def _bounds(field: JobField) -> dict[str, Any]:
    """The range of a field with a unit; shares, which a job has in thousandths, as people read them."""
    bounds = next((mark for mark in get_args(field.kind) if field.unit and isinstance(mark, Meta)), Meta())
    found = {"ge": bounds.ge, "le": bounds.le}
    if field.unit not in UNITS:
        found = {end: bound and bound / WHOLE_GPU for end, bound in found.items()}
    return {
        end: int(bound) if bound == int(bound) else bound for end, bound in found.items() if bound is not None
    }


SECTIONS[ResourceRequest] = section_model(_Resources, ResourceRequest)
SECTIONS[RetryPolicy] = section_model(_Retry, RetryPolicy)
SECTIONS[NodeChoice] = section_model(_Nodes, NodeChoice)
SECTIONS[Environment] = section_model(_Programs, Environment)


def units_of(section: str, key: str) -> Mapping[str, int] | None:
    """The units that a field may be written in; None for a field without units."""
    fields = (field for field in job_fields(JobSpec) if (field.section, field.key) == (section, key))
    return next((UNITS[field.unit].sizes for field in fields if field.unit in UNITS), None)


class Workers(Section):
    """A range of worker counts: each attempt starts with a number for which there is room. Such a job has a
    `global_batch_size` and no parameter servers."""

    min: int = Field(1, ge=1, le=MAX_WORKERS, description="Minimum number of workers.", examples=[1])
    max: int = Field(ge=1, le=MAX_WORKERS, description="Maximum number of workers.", examples=[8])


def form_of_workers(given: object) -> str:
    return RANGE if isinstance(given, Mapping | Workers) else NUMBER


NUMBER, RANGE = "number", "range"
"""The two forms of `workers`: tags that no message shows."""


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
