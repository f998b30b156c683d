"""The job file's model as JSON Schema, for completion in editors (`schemas/job.schema.json`)."""

from collections.abc import Mapping
from typing import Any

from penstock.model.jobs.job_fields import job_fields
from penstock.model.jobs.job_spec import JobSpec
from penstock.sdk.job_file.job_sections import UNITS
from penstock.sdk.job_file.jobfile import PATH, JobFile, sections
from penstock.sdk.job_file.units import show


def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the job file, with descriptions, examples and patterns."""
    schema = JobFile.model_json_schema()
    for field in job_fields(JobSpec):
        part = schema["$defs"][sections()[field.section].__name__] if field.section else schema
        entry = part["properties"].get(field.key, {})
        if "$ref" in entry:
            entry.pop("default")  # its fields have their own defaults
        if field.unit in UNITS:
            _as_written(entry, field.default, UNITS[field.unit].sizes)
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
