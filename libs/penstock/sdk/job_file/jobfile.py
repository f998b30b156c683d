"""Parser of the job file, YAML with human units, into a `JobSpec`.

`parse_job` reports all problems at once, each with the field and the remedy. `job_schema` is the
same model as JSON Schema, for completion in editors (`schemas/job.schema.json`).
The models of its sections are in `job_sections`.
"""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, ValidationError

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns import commands
from penstock.model.nouns.gpu_names import counted_wrongly
from penstock.model.nouns.job_ids import is_generated
from penstock.model.nouns.types import (
    MAX_ENV_ENTRIES,
    MAX_WORKERS,
    WHOLE_GPU,
    Category,
    CheckpointKind,
    Companions,
    Qos,
    Trait,
)
from penstock.model.nouns.worker_range import wrong_shape
from penstock.model.schema.validation import checked
from penstock.sdk.job_file.command_words import slips, with_script
from penstock.sdk.job_file.job_problems import Problem, not_utf8, problem_of
from penstock.sdk.job_file.job_sections import (
    NUMBER,
    RANGE,
    Duration,
    GpuName,
    Name,
    Nodes,
    Programs,
    Resources,
    Retry,
    Section,
    Text,
    Workers,
    form_of_workers,
    units_of,
    with_references,
)
from penstock.sdk.job_file.units import show

MAX_PROBLEMS = 50  # more would not be read

PATH = "path"
"""Value of `environment`: the node's own PATH."""
PACKED = "sha256:"
"""Prefix of `sync` for a folder whose archive the gateway has."""
SECRET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def _packed(sync: str) -> str:
    """Raises `ValueError` for a folder: a job names its archive."""
    if re.fullmatch(f"{PACKED}[0-9a-f]{{64}}", sync) is None:
        raise ValueError(
            "only `penstock submit` packs a folder; elsewhere PUT its archive to /v1/code/DIGEST and give "
            f"{PACKED}DIGEST"
        )
    return sync


def _no_id(name: str) -> str:
    """Raises `ValueError`."""
    if is_generated(name):
        raise ValueError("has the form of a job's id; choose another name, such as one with a '-'")
    return name


class JobFile(Section):
    """A training job: what to run, not where."""

    name: Annotated[Name, AfterValidator(_no_id)] = Field(
        "job", description="Name of the job, shown in tables.", examples=["resnet50"]
    )
    owner: Name = Field("unknown", description="Owner of the job.", examples=["alice"])
    command: list[str] = Field(
        min_length=1,
        max_length=commands.MAX_ARGUMENTS,
        description="Program and arguments as a list, which no shell reads; quote numbers. Or a text: the "
        "lines of a script for a shell.",
        examples=[["python", "train.py", "--epochs", "3"]],
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        max_length=MAX_ENV_ENTRIES,
        description="Environment variables. Quote numbers. `{secret: NAME}` as a value: an entry of "
        "`secrets`.",
        examples=[{"OMP_NUM_THREADS": "4"}],
    )
    secrets: dict[str, Annotated[str, Field(pattern=SECRET_NAME)]] = Field(
        default_factory=dict,
        max_length=MAX_ENV_ENTRIES,
        description="Environment variables that the node sets from its secrets of these names; their values "
        "are in no file or log.",
        examples=[{"WANDB_API_KEY": "wandb"}],
    )
    workdir: Text | None = Field(
        None,
        description="Folder to run in, on the node, relative to the job file; default: the folder of the job "
        "file.",
        examples=["/home/alice/resnet"],
    )
    sync: Annotated[Text, AfterValidator(_packed)] | None = Field(
        None,
        description="Folder to pack and run in, relative to the job file; `penstock submit` sends it once "
        "and nodes unpack it.",
        examples=["."],
    )
    environment: Programs | None = Field(
        None, description="Where Python and other programs come from; `path`: from the node's own PATH."
    )
    workers: Annotated[
        Annotated[int, Field(ge=1, le=MAX_WORKERS), Tag(NUMBER)] | Annotated[Workers, Tag(RANGE)],
        Discriminator(form_of_workers),
    ] = Field(
        1,
        description="Workers; they start together or not at all. `{min: 1, max: 8}`: any number in between, "
        "chosen anew for each attempt.",
        examples=[4, {"min": 1, "max": 8}],
    )
    parameter_servers: int = Field(
        0, ge=0, le=256, description="Parameter servers beside the workers; 0: all-reduce."
    )
    resources: Resources = Field(Resources(), description="Resources of each worker; estimated if left out.")
    model: Name | None = Field(
        None, description="Name of the network, to learn from earlier runs.", examples=["resnet50"]
    )
    batch_size: int | None = Field(
        None, ge=1, le=1 << 30, description="Batch size per worker.", examples=[64]
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        le=1 << 30,
        description="In place of `batch_size`: batch size of all workers together; each worker reads its "
        "part from `PENSTOCK_BATCH_SIZE`.",
        examples=[512],
    )
    category: Category | None = Field(
        None,
        description="Kind of data (cv, nlp or speech); the initial number of cores depends on it.",
        examples=["cv"],
    )
    traits: list[Trait] = Field(
        default_factory=list,
        max_length=3,
        description="Properties that change how many cores the job needs: pipelined, many_weights, "
        "heavy_preprocessing.",
        examples=[["pipelined"]],
    )
    iterations: int | None = Field(
        None,
        ge=1,
        le=1 << 53,
        description="Planned number of iterations, for the estimate of the remaining time.",
        examples=[50_000],
    )
    target_loss: float | None = Field(
        None,
        ge=-1e100,
        le=1e100,
        description="The job ends once its loss reaches this value, after `iterations` at the latest.",
        examples=[0.35],
    )
    gpu_models: list[GpuName] = Field(
        default_factory=list,
        max_length=16,
        description="Allowed GPU models; empty: any. `v100` matches every name with this part, such as "
        "nvidia-smi's Tesla V100-SXM2-16GB.",
        examples=[["A100"]],
    )
    nodes: Nodes | None = Field(
        None, description="Nodes on which the job may run, by name or label; default: all."
    )
    retry: Retry = Field(Retry(), description="How often a failed job is tried again.")
    queue_timeout: Duration | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Give up after waiting this long, each time that the job queues.",
        examples=["10m"],
    )
    run_timeout: Duration | None = Field(
        None, ge=1, le=1 << 40, description="Stop after running this long.", examples=["2h"]
    )
    grace: Duration = Field(
        10_000,
        le=600_000,
        description="Time between SIGTERM and SIGKILL when the job is stopped.",
        examples=["10s"],
    )
    preemptible: bool = Field(
        True,
        description="Whether the job may be stopped to make way for another one; false: it runs to its end, "
        "and other jobs wait.",
    )
    priority: int = Field(
        0,
        ge=-10,
        le=10,
        description="Priority among your own jobs, the larger the earlier; it has no effect on other owners' "
        "jobs. Read by the profile `penstock`.",
        examples=[5],
    )
    qos: Qos | None = Field(
        None,
        description="Service class: urgent, prior (as soon as alone on one GPU) or normal (twice that). Read "
        "by the profile `genie`.",
        examples=["prior"],
    )
    deadline: Duration | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Time after submission within which the job should be done, in place of its class. Read "
        "by the profile `genie`.",
        examples=["6h"],
    )
    checkpoint: CheckpointKind = Field(
        "none",
        description="How the job saves its progress when it is stopped: `sdk` (penstock.sdk.checkpoint), "
        "`signal` (on SIGTERM, in a place of the script's choice), `none`.",
        examples=["sdk"],
    )
    prelaunch: bool = Field(
        False,
        description='The script waits for its GPUs at `phase("train")` and uses none before: it may launch '
        "while the jobs that hold them end.",
    )
    companions: Companions = Field(
        "tenant",
        description="Whose jobs may take turns with it on the same GPUs: `tenant`, only your own tenant's; "
        "`any`, also other tenants' that allow any, too.",
        examples=["any"],
    )
    tied_to: Literal["follower"] | None = Field(
        None,
        description="`follower`: the job is cancelled when nobody has followed it (`submit`, `wait`) for "
        "`tied_grace`.",
        examples=["follower"],
    )
    tied_grace: Duration = Field(
        300_000,
        le=86_400_000,
        description="How long a tied job goes on without a follower.",
        examples=["5m"],
    )
    interactive: bool = Field(
        False,
        description="The job has a terminal, as for a shell: `penstock attach` shows it here; what it "
        "shows is its output, too.",
    )
    may_submit: bool = Field(
        False,
        description="Whether its program may submit jobs, as `penstock submit` or by the client: it gets "
        "the gateway's URL and a token of its own.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="Pairs of free text by which the job can be found.",
        examples=[{"team": "vision"}],
    )

    @property
    def most_workers(self) -> int:
        return self.workers.max if isinstance(self.workers, Workers) else self.workers

    @property
    def fewest_workers(self) -> int | None:
        """Lower end of the range of workers; None: it has one number of workers."""
        return self.workers.min if isinstance(self.workers, Workers) else None

    def to_spec(self) -> JobSpec:
        """The same job in machine units. Raises pydantic's ValidationError for problems that span fields."""
        asked, share = self.resources, self.resources.gpu_share
        fields = {name: getattr(self, name) for name in JobSpec.__struct_fields__ if hasattr(self, name)}
        return checked(
            JobSpec,
            fields
            | commands.command_fields(self.command)
            | {
                "workers": self.most_workers,
                "min_workers": self.fewest_workers,
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
                "nodes": self.nodes and self.nodes.model_dump(),
                "code": self.sync and self.sync.removeprefix(PACKED),
                "environment": self.environment and self.environment.asked(),
                "queue_timeout_ms": self.queue_timeout,
                "run_timeout_ms": self.run_timeout,
                "deadline_ms": self.deadline,
                "grace_ms": self.grace,
                "tied_grace_ms": self.tied_grace,
            },
        )


class BadJob(Exception):
    """A job file was refused; `problems` lists all its problems, at least one."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def parse_job(data: Mapping[str, object]) -> JobSpec:
    """The job that a parsed YAML file describes. Raises `BadJob` with all problems of all fields.

    Rules that span fields (the size of the whole gang) are checked once each field is valid by itself.
    """
    if not isinstance(data, Mapping):
        raise BadJob(
            (Problem("job", "is not a mapping; write fields such as `command: [python, train.py]`"),)
        )
    data = {name: found for name, found in data.items() if not str(name).startswith("x-")}
    if unreadable := tuple(islice(not_utf8(data), MAX_PROBLEMS)):
        raise BadJob(unreadable)
    problems: list[Problem] = []
    fields, twice = with_references(data)
    fields, wrong_script = with_script(fields)
    if fields.get("environment") == PATH:
        del fields["environment"]
    problems += [Problem("env", f"{name} stands in env and in secrets; remove one") for name in twice]
    problems += [Problem(*wrong) for wrong in wrong_script]
    if wrong_script:
        fields.setdefault("command", ["true"])
    try:
        job = JobFile.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [problem_of(detail, fields, _sections()) for detail in details]
        wrong = {detail["loc"][0] for detail in details if detail["loc"]}
        # Check the rest as well, so that problems which span fields come out in the same answer.
        rest = {name: value for name, value in fields.items() if name not in wrong}
        job = JobFile.model_validate({"command": ["true"], **rest})
    problems += [
        Problem("command", f"{slip.message}; {slip.remedy}") for slip in slips(job.command) if slip.certain
    ]
    if too_long := commands.command_problem(job.command, commands.MAX_COMMAND_BYTES):
        problems.append(Problem("command", too_long))
        job = job.model_copy(update={"command": ["true"]})
    counts = (counted_wrongly(model, job.resources.gpus) for model in job.gpu_models)
    problems += [Problem("gpu_models", text) for text in counts if text]
    servers, batch, whole = job.parameter_servers, job.batch_size, job.global_batch_size
    wrong_at = wrong_shape(job.fewest_workers, job.most_workers, servers, batch, whole)
    if wrong_at is not None:
        field, text = wrong_at
        if field not in {problem.field for problem in problems}:
            problems.append(Problem("workers.min" if field == "min_workers" else field, text))
        job = job.model_copy(update={"workers": job.most_workers, "global_batch_size": None})
    try:
        spec = job.to_spec()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems += [problem_of(detail, fields, _sections()) for detail in errors]
    if problems:
        raise BadJob(tuple(problems[:MAX_PROBLEMS]))
    return spec


def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the job file, with descriptions, examples and patterns."""
    schema = JobFile.model_json_schema()
    for name, model in _sections().items():
        places = schema["$defs"][model.__name__] if name else schema
        for field, info in model.model_fields.items():
            entry, units = places["properties"][field], units_of(info)
            if "$ref" in entry:
                entry.pop("default")  # its fields have their own defaults
            if units is not None:
                _as_written(entry, info.default, units)
    schema["properties"]["environment"]["anyOf"].insert(0, {"const": PATH})
    command = schema["properties"]["command"]
    words = {name: command.pop(name) for name in ("items", "maxItems", "minItems", "type")}
    command["anyOf"] = [words, {"type": "string", "description": "A script for a shell."}]
    lines = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["script"] = lines | {
        "title": "Script",
        "description": "In place of command: the lines of a script for a shell, `bash -e` without a first "
        "line `#!`.",
        "examples": ["pip list\npython train.py"],
    }
    schema["required"] = []  # one of command and script is: the parser says so
    workers = schema["properties"]["workers"]
    workers["anyOf"] = workers.pop("oneOf")  # no value is of both forms
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
    """Converts bounds and default of a field with units from machine units to human units."""
    for part in (entry, *entry["anyOf"]):
        part.pop("ge", None)
        part.pop("le", None)
    if default is not None:
        entry["default"] = show(default, units)


def _sections() -> dict[str, type[BaseModel]]:
    """Section name → model; the file itself is ''."""
    return {
        "": JobFile,
        "workers": Workers,
        "resources": Resources,
        "environment": Programs,
        "nodes": Nodes,
        "retry": Retry,
    }
