"""Parser of the job file, YAML with human units, into a `JobSpec`.

`parse_job` reports all problems at once, each with the field and the remedy. The models of its sections are
in `job_sections`.
"""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, ValidationError

from penstock.model.jobs.job_fields import job_fields
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns import commands
from penstock.model.nouns.gpu_names import counted_wrongly
from penstock.model.nouns.job_ids import is_generated
from penstock.model.nouns.types import WHOLE_GPU
from penstock.model.nouns.worker_range import wrong_shape
from penstock.model.schema.validation import checked, constraint
from penstock.sdk.job_file.command_words import slips, with_script
from penstock.sdk.job_file.job_problems import Problem, not_utf8, problem_of
from penstock.sdk.job_file.job_sections import (
    NUMBER,
    RANGE,
    SECTIONS,
    GpuName,
    Section,
    Workers,
    form_of_workers,
    section_model,
    with_references,
)

MAX_PROBLEMS = 50  # more would not be read

PATH = "path"
"""Value of `environment`: the node's own PATH."""
PACKED = "sha256:"
"""Prefix of `sync` for a folder whose archive the gateway has."""


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


class _JobFile(Section):
    """A training job: what to run, not where."""

    @property
    def most_workers(self: Any) -> int:
        return int(self.workers.max if isinstance(self.workers, Workers) else self.workers)

    @property
    def fewest_workers(self: Any) -> int | None:
        """Lower end of the range of workers; None: it has one number of workers."""
        return self.workers.min if isinstance(self.workers, Workers) else None

    def to_spec(self: Any) -> JobSpec:
        """The same job in machine units. Raises pydantic's ValidationError for problems that span fields."""
        more = {
            "workers": self.most_workers,
            "min_workers": self.fewest_workers,
            "code": self.sync and self.sync.removeprefix(PACKED),
        }
        return checked(JobSpec, _machine(self, "") | commands.command_fields(self.command) | more)


def _machine(model: Any, section: str) -> dict[str, Any]:
    """A section's fields in machine units."""
    found: dict[str, Any] = {}
    for field in job_fields(JobSpec):
        if field.section == section and field.about.help:
            value = getattr(model, field.key)
            if isinstance(value, Section):
                value = _machine(value, field.key)
            elif field.unit == "_milli" and value is not None:
                value = round(value * WHOLE_GPU)
            found[field.name] = value
    return found


def _bounds(name: str) -> list[Any]:
    """The constraints of a job's field, for a type of its own."""
    field = next(field for field in job_fields(JobSpec) if field.name == name)
    return [constraint(mark) for mark in get_args(field.kind)[1:]]


JobFile: Any = section_model(
    _JobFile,
    JobSpec,
    {
        "name": Annotated[str, *_bounds("name"), AfterValidator(_no_id)],
        "command": Annotated[list[str], Field(min_length=1, max_length=commands.MAX_ARGUMENTS)],
        "sync": Annotated[str, *_bounds("workdir"), AfterValidator(_packed)],
        "workers": Annotated[
            Annotated[int, *_bounds("workers"), Tag(NUMBER)] | Annotated[Workers, Tag(RANGE)],
            Discriminator(form_of_workers),
        ],
        "gpu_models": Annotated[list[GpuName], *_bounds("gpu_models")],
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
        problems += [problem_of(detail, fields, sections()) for detail in details]
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
        spec: JobSpec = job.to_spec()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems += [problem_of(detail, fields, sections()) for detail in errors]
    if problems:
        raise BadJob(tuple(problems[:MAX_PROBLEMS]))
    return spec


def sections() -> dict[str, type[BaseModel]]:
    """Section name → model; the file itself is ''."""
    parts = {field.key: SECTIONS[field.kind] for field in job_fields(JobSpec) if field.kind in SECTIONS}
    return {"": JobFile, "workers": Workers, **parts}
