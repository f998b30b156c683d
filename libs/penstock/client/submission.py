"""The job of a submission, checked as a job file is. Importing it takes long: pydantic, and the models of all
events."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.client.errors import BadField, BadRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock.sdk.reporter.own_folder import submitted_here


def written(spec: JobSpec) -> dict[str, Any]:
    """The job as it is sent."""
    return as_written(spec)


def job_of(job: JobSpec | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> JobSpec:
    """The job of a spec, or of the fields of a job file; owner and workdir default to this user and folder.
    Raises `BadRequest`."""
    if isinstance(job, JobSpec):
        try:
            return msgspec.structs.replace(job, **fields)
        except TypeError as error:
            raise BadRequest(f"this is not a job: {error}; give fields of JobSpec") from error
    try:
        return parse_job(submitted_here({**(job or {}), **fields}))
    except BadJob as error:
        wrong = [BadField(problem.field, *_split(problem.text)) for problem in error.problems]
        raise BadRequest(f"this is not a job: {error}", fields=wrong) from error


def _split(text: str) -> tuple[str, str]:
    message, _, remedy = text.rpartition("; ")
    return (message, remedy) if message else (text, "correct it")
