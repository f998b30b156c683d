"""The job file: what users write in YAML, with human units, and its translation into a `JobSpec`.

`parse_job` refuses with every problem at once, each naming the field and the remedy. `job_schema` is the
same model as JSON Schema, for completion in editors (`schemas/job.schema.json`).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.model.types import (
    MAX_CORES_PER_NODE,
    MAX_ENV_ENTRIES,
    MAX_GPUS_PER_NODE,
    WHOLE_GPU,
    Category,
    Environment,
    Identifier,
    JobSpec,
    ShortText,
    Trait,
)
from penstock.model.validation import checked, constraint
from penstock.redaction import brief
from penstock.sdk.units import (
    DURATION_PATTERN,
    MBIT_PER_UNIT,
    MEMORY_PATTERN,
    MIB_PER_UNIT,
    MS_PER_UNIT,
    RATE_PATTERN,
    duration_ms,
    memory_mib,
    rate_mbps,
    show,
)
from penstock.suggestion import near

MAX_PROBLEMS = 50  # more would not be read


def _written(pattern: str, example: str, plain: str) -> WithJsonSchema:
    """JSON Schema of a field that is written with a unit, for editors."""
    text = {"type": "string", "pattern": pattern, "examples": [example]}
    return WithJsonSchema({"anyOf": [text, {"type": "number", "minimum": 0, "description": plain}]})


Name = Annotated[str, constraint(get_args(Identifier)[1])]
Text = Annotated[str, constraint(get_args(ShortText)[1])]
Duration = Annotated[int, BeforeValidator(duration_ms), _written(DURATION_PATTERN, "10m", "seconds")]
Memory = Annotated[int, BeforeValidator(memory_mib), _written(MEMORY_PATTERN, "8GiB", "MiB")]
Rate = Annotated[int, BeforeValidator(rate_mbps), _written(RATE_PATTERN, "10Gbit", "Mbit/s")]
_UNITS: Mapping[object, Mapping[str, int]] = {
    duration_ms: MS_PER_UNIT,
    memory_mib: MIB_PER_UNIT,
    rate_mbps: MBIT_PER_UNIT,
}


PATH = "path"
"""As `environment`: the node's own PATH."""
PACKED = "sha256:"
"""Begins `sync` of a folder whose archive the gateway has."""
SECRET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def _packed(sync: str) -> str:
    """Raises `ValueError` for a folder: a job names its archive."""
    if re.fullmatch(f"{PACKED}[0-9a-f]{{64}}", sync) is None:
        raise ValueError(
            f"only `penstock submit` packs a folder; elsewhere PUT its archive to /v1/code/DIGEST and give {PACKED}DIGEST"
        )
    return sync


class _Section(BaseModel):
    """Numbers must be written as numbers and text as text: `strict`. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Resources(_Section):
    """What each worker needs. Every field may be left out: Penstock then estimates it."""

    gpus: int | None = Field(
        None, ge=0, le=MAX_GPUS_PER_NODE, description="GPUs per worker; 0 for none.", examples=[1]
    )
    gpu_share: float | None = Field(
        None, ge=0.001, le=1, description="Share of one GPU, for small jobs side by side.", examples=[0.5]
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


class Retry(_Section):
    """How often a failed job is tried again."""

    max_attempts: int = Field(1, ge=1, le=100, description="Attempts in all; 1: no retry.", examples=[3])
    backoff: Duration = Field(
        1_000, le=3_600_000, description="Wait before the second attempt; doubles each time.", examples=["5s"]
    )
    backoff_max: Duration = Field(
        60_000, le=86_400_000, description="The longest wait between attempts.", examples=["1m"]
    )


class Programs(_Section):
    """Where Python and other programs come from: exactly one of these; `path`, the default: the node's own PATH."""

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


class JobFile(_Section):
    """A training job: what to run, not where."""

    name: Name = Field("job", description="Shown in tables.", examples=["resnet50"])
    owner: Name = Field("unknown", description="Who it belongs to.", examples=["alice"])
    command: list[Annotated[str, Field(max_length=8_192)]] = Field(
        min_length=1,
        max_length=512,
        description="Program and arguments as a list; no shell reads it. Quote numbers.",
        examples=[["python", "train.py", "--epochs", "3"]],
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        max_length=MAX_ENV_ENTRIES,
        description="Environment variables. Quote numbers. `{secret: NAME}` as a value: an entry of `secrets`.",
        examples=[{"OMP_NUM_THREADS": "4"}],
    )
    secrets: dict[str, Annotated[str, Field(pattern=SECRET_NAME)]] = Field(
        default_factory=dict,
        max_length=MAX_ENV_ENTRIES,
        description="Variables that the node sets from its secrets of these names; their values are in no file or log.",
        examples=[{"WANDB_API_KEY": "wandb"}],
    )
    workdir: Text | None = Field(
        None,
        description="Folder to run in, on the node; relative to the job file, whose folder is the default.",
        examples=["/home/alice/resnet"],
    )
    sync: Annotated[Text, AfterValidator(_packed)] | None = Field(
        None,
        description="Folder to pack and run in, relative to the job file; `penstock submit` sends it once and nodes unpack it.",
        examples=["."],
    )
    environment: Programs | None = Field(
        None, description="Where Python and other programs come from; `path`: from the node's own PATH."
    )
    workers: int = Field(1, ge=1, le=256, description="Workers; they start together or not at all.")
    parameter_servers: int = Field(
        0, ge=0, le=256, description="Parameter servers beside the workers; 0: all-reduce."
    )
    resources: Resources = Field(Resources(), description="What each worker needs; else estimated.")
    model: Name | None = Field(
        None, description="Name of the network, to learn from earlier runs.", examples=["resnet50"]
    )
    batch_size: int | None = Field(None, ge=1, le=1 << 30, description="Per worker.", examples=[64])
    category: Category | None = Field(
        None,
        description="What it works on (cv, nlp or speech): for the cores it starts with.",
        examples=["cv"],
    )
    traits: list[Trait] = Field(
        default_factory=list,
        max_length=3,
        description="What changes how many cores it needs: pipelined, many_weights, heavy_preprocessing.",
        examples=[["pipelined"]],
    )
    iterations: int | None = Field(
        None, ge=1, le=1 << 53, description="How many it will run; for its remaining time.", examples=[50_000]
    )
    target_loss: float | None = Field(
        None,
        ge=-1e100,
        le=1e100,
        description="It ends once its loss is there, after `iterations` at the latest.",
        examples=[0.35],
    )
    gpu_models: list[Name] = Field(
        default_factory=list,
        max_length=16,
        description="Allowed GPU models; empty: any.",
        examples=[["NVIDIA-A100-40GB"]],
    )
    retry: Retry = Field(Retry(), description="How often a failed job is tried again.")
    queue_timeout: Duration | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Give up after waiting so long, each time that it queues.",
        examples=["10m"],
    )
    run_timeout: Duration | None = Field(
        None, ge=1, le=1 << 40, description="Stop after running so long.", examples=["2h"]
    )
    grace: Duration = Field(
        10_000, le=600_000, description="Between SIGTERM and SIGKILL when it is stopped.", examples=["10s"]
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="Free text pairs to find it by.",
        examples=[{"team": "vision"}],
    )

    def to_spec(self) -> JobSpec:
        """The same job in machine units. Raises pydantic's ValidationError for what spans fields."""
        asked, share = self.resources, self.resources.gpu_share
        fields = {name: getattr(self, name) for name in JobSpec.__struct_fields__ if hasattr(self, name)}
        return checked(
            JobSpec,
            fields
            | {
                "resources": {
                    "gpus": asked.gpus,
                    "cores": asked.cores,
                    "host_memory_mib": asked.host_memory,
                    "gpu_memory_mib": asked.gpu_memory,
                    "bandwidth_mbps": asked.bandwidth,
                    "gpu_share_milli": None if share is None else round(share * WHOLE_GPU),
                },
                "retry": {
                    "max_attempts": self.retry.max_attempts,
                    "backoff_ms": self.retry.backoff,
                    "backoff_max_ms": self.retry.backoff_max,
                },
                "code": self.sync and self.sync.removeprefix(PACKED),
                "environment": self.environment and self.environment.asked(),
                "queue_timeout_ms": self.queue_timeout,
                "run_timeout_ms": self.run_timeout,
                "grace_ms": self.grace,
            },
        )


class Problem(NamedTuple):
    """One thing that is wrong. `field`: a path such as `resources.gpus`, or `job` for the whole file."""

    field: str
    text: str
    """What is wrong, then the remedy."""

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


class BadJob(Exception):
    """A job file was refused; `problems` holds everything that is wrong with it, at least one."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def parse_job(data: Mapping[str, object]) -> JobSpec:
    """The job that a parsed YAML file describes. Raises `BadJob` with all problems of all fields.

    What spans fields (the size of the whole gang) is checked once each field is right by itself.
    """
    if not isinstance(data, Mapping):
        raise BadJob((Problem("job", "is no mapping; write fields such as `command: [python, train.py]`"),))
    problems: list[Problem] = []
    fields, twice = _with_references(dict(data))
    if fields.get("environment") == PATH:
        del fields["environment"]
    problems += [Problem("env", f"{name} stands in env and in secrets; remove one") for name in twice]
    try:
        job = JobFile.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [_problem(detail, fields) for detail in details]
        wrong = {detail["loc"][0] for detail in details if detail["loc"]}
        # Check the rest as well, so that problems which span fields come out in the same answer.
        rest = {name: value for name, value in fields.items() if name not in wrong}
        job = JobFile.model_validate({"command": ["true"], **rest})
    try:
        spec = job.to_spec()
    except ValidationError as error:
        problems += [_problem(detail, fields) for detail in error.errors(include_url=False)]
    if problems:
        raise BadJob(tuple(problems[:MAX_PROBLEMS]))
    return spec


def _with_references(fields: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """With values `{secret: NAME}` of `env` as entries of `secrets`, and which of them stand there already."""
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


def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the job file, with descriptions, examples and patterns."""
    schema = JobFile.model_json_schema()
    for name, model in _sections().items():
        places = schema["$defs"][model.__name__] if name else schema
        for field, info in model.model_fields.items():
            entry, units = places["properties"][field], _units(info)
            if "$ref" in entry:
                entry.pop("default")  # its fields have their own defaults
            if units is not None:
                _as_written(entry, info.default, units)
    schema["properties"]["environment"]["anyOf"].insert(0, {"const": PATH})
    reference = {"type": "object", "required": ["secret"], "properties": {"secret": {"type": "string"}}}
    env = schema["properties"]["env"]
    env["additionalProperties"] = {
        "anyOf": [env["additionalProperties"], reference | {"additionalProperties": False}]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "penstock.job_file",
        **schema,
        "title": "Penstock job file",
    }


def _as_written(entry: dict[str, Any], default: int | None, units: Mapping[str, int]) -> None:
    """Bounds and default of a field with units are in machine units: gives them back to people's."""
    for part in (entry, *entry["anyOf"]):
        part.pop("ge", None)
        part.pop("le", None)
    if default is not None:
        entry["default"] = show(default, units)


def _sections() -> dict[str, type[BaseModel]]:
    """Section name → model; the file itself is ''."""
    return {"": JobFile, "resources": Resources, "environment": Programs, "retry": Retry}


def _unknown(path: tuple[int | str, ...]) -> str:
    """The remedy for a field that does not exist: its place elsewhere, else the nearest name here."""
    section, name = ".".join(str(part) for part in path[:-1]), str(path[-1])
    known = list(_sections()[section].model_fields)
    for other, model in _sections().items():
        if other != section and name in model.model_fields:
            return f"is not known here; write it under `{other}`" if other else "belongs at the top level"
    if (meant := near(name, known)) is not None:
        return f"is not known; did you mean `{meant}`?"
    return f"is not known; remove it, or use one of {', '.join(known)}"


def _problem(detail: ErrorDetails, fields: Mapping[Any, Any]) -> Problem:
    """One of pydantic's findings as text: field, what is wrong, remedy."""
    path = tuple(part for part in detail["loc"] if part != "[key]")
    given = detail.get("input") if len(path) < len(detail["loc"]) else _written_at(fields, path)
    return Problem(".".join(str(part) for part in path) or "job", _text(path, detail["type"], given, detail))


def _written_at(fields: Mapping[Any, Any], path: tuple[int | str, ...]) -> Any:
    """What the user wrote there, before any conversion; None where nothing is."""
    found: Any = fields
    for part in path:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and isinstance(part, int):
            found = found[part]
        else:
            return None
    return found


def _text(path: tuple[int | str, ...], kind: str, given: object, detail: ErrorDetails) -> str:
    """What is wrong, then the remedy, for one kind of finding."""
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return "is missing; add it, such as `command: [python, train.py]`"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    if given is None:
        return "is empty; give a value or remove the line"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = context.get("ge", context.get("le", 0))
        side = "at least" if "ge" in context else "at most"
        return f"{brief(given)} is out of range; give {side} {_human(path, bound)}"
    if kind in ("string_too_long", "string_too_short", "too_long", "too_short"):
        bound = context.get("max_length", context.get("min_length", 0))
        what = "characters" if kind.startswith("string") else "entries"
        wrong, right = ("long", "most") if "long" in kind else ("short", "least")
        return f"is too {wrong}; give at {right} {bound} {what}"
    if kind == "literal_error":
        return f"{brief(given)} is not known; use one of {context['expected']}"
    shown = brief(given) if kind in _QUANTITIES else _KINDS.get(type(given)) or brief(given)
    return f"{shown} {_REMEDIES.get(kind, detail['msg'])}"


_QUANTITIES = frozenset({"float_type", "finite_number", "int_type"})
_KINDS: Mapping[type, str] = {int: "a number", float: "a number", str: "this text"}
"""What is shown of a value that belongs elsewhere: `env: PASSWORD=…` without the password."""
_REMEDIES = {
    "string_type": "is no text; quote it",
    "invalid_key": "is no field name; write names as text",
    "list_type": "is no list; write each word by itself, such as [python, train.py]",
    "dict_type": "is no mapping; write `name: value` lines below it",
    "model_type": "is no mapping; write `name: value` lines below it",
    "float_type": "is no number; write one without quotes",
    "finite_number": "is no number; write one such as 0.5",
    "int_type": "is no whole number; write one without quotes",
    "string_pattern_mismatch": "has characters that are not allowed; "
    "use letters, digits and . _ : / - and begin with a letter or digit",
}


def _human(path: tuple[int | str, ...], bound: float) -> str:
    """A bound in the units that the field is written in."""
    *section, name = (str(part) for part in path)
    units = _units(_sections()[".".join(section)].model_fields[name])
    return str(bound) if units is None else show(int(bound), units)


def _units(info: FieldInfo) -> Mapping[str, int] | None:
    """The units that a field is written in; None for a field without."""
    marks = [*info.metadata, *(mark for kind in get_args(info.annotation) for mark in get_args(kind))]
    readers = (mark.func for mark in marks if isinstance(mark, BeforeValidator))
    return next((_UNITS[reader] for reader in readers), None)
