"""Parsing of submissions, from a request's body to a job: ids, digests, JSON and YAML. Pure."""

import json
from collections import Counter
from hashlib import sha256
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.job_ids import is_generated
from penstock.model.schema.validation import checked_json
from penstock.model.wire.codec import as_written, encode
from penstock.sdk.job_file.job_yaml import JobLoader, problem_of
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock.text.redaction import unquoted
from penstock_services.gateway.core.problems import BadField, Problem, bad_fields, invalid


class PlainLoader(JobLoader):
    """YAML without aliases, since a few lines of them can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: aliases (*name) are not allowed; write it out"
            )
        return super().compose_node(parent, index)


def owned(spec: JobSpec, tenant: str | None) -> JobSpec:
    """The job with the caller's tenant as owner, for any value of its own field. Raises `Problem` for a
    name that looks like an id, and for given parents."""
    if spec.parents:
        field = BadField("parents", "is set by the gateway", "leave it out")
        raise invalid("this is not a job", [field])
    if is_generated(spec.name):
        field = BadField("name", "has the form of a job's id", "choose another, such as one with a '-'")
        raise invalid("this is not a job", [field])
    return spec if tenant is None else msgspec.structs.replace(spec, owner=tenant)


def read_json(body: bytes) -> Any:
    """Raises `Problem`."""
    try:
        found = msgspec.json.decode(body)
        _refuse_keys_twice(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(
            "this is not JSON", [BadField("body", str(error)[:512], "send well-formed JSON")]
        ) from error
    return found


def _refuse_keys_twice(body: bytes) -> None:
    """Refuses well-formed JSON with repeated keys in an object, of which the last would count. Raises
    `Problem` with all of them."""
    twice: dict[str, None] = {}

    def note(pairs: list[tuple[str, Any]]) -> None:
        if len({key for key, _ in pairs}) < len(pairs):
            twice.update((key, None) for key, count in Counter(key for key, _ in pairs).items() if count > 1)

    json.loads(body, object_pairs_hook=note, parse_int=str)
    if twice:
        found = [
            BadField(key[:64] or "body", "stands twice in an object", "remove one of them") for key in twice
        ]
        raise invalid("this JSON is ambiguous", found)


def spec_from_json(body: bytes) -> JobSpec:
    """Reads a job in machine units. Unknown fields are errors. Raises `Problem` with every bad field."""
    try:
        spec = checked_json(JobSpec, body, strict=True)
        _refuse_keys_twice(body)
    except ValidationError as error:
        raise invalid("this is not a job", bad_fields(error)) from error
    except RecursionError as error:
        raise invalid("this is not a job", [_too_deep()]) from error
    return spec


def spec_from_yaml(body: bytes) -> JobSpec:
    """Reads a job file in human units. Raises `Problem` with every bad field."""
    try:
        data = yaml.load(body, PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise invalid(
            "this is not YAML", [BadField("body", _unreadable(error), "correct the file")]
        ) from error
    except RecursionError as error:
        raise invalid("this is not YAML", [_too_deep()]) from error
    try:
        return parse_job(data)
    except BadJob as error:
        raise invalid(
            "this is not a job", [_split(problem.field, problem.text) for problem in error.problems]
        ) from error


def _unreadable(error: Exception) -> str:
    """Line, column and error; without the text itself, which may contain a password."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return unquoted(" ".join(str(error).split()))[:512]
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + problem_of(error)[:512]


def _too_deep() -> BadField:
    return BadField("body", "is nested too deeply", "flatten it")


def _split(field: str, text: str) -> BadField:
    """Splits `error; remedy` in two."""
    message, mark, remedy = text.partition("; ")
    return BadField(field, message, remedy if mark else "correct it")


def submission(job_id: str, spec: JobSpec) -> JobSubmitted:
    """The event. Raises `Problem` when it exceeds the size limit of events."""
    event = JobSubmitted(job_id=job_id, spec=spec)
    size = len(encode(event))
    if size > JobSubmitted.MAX_BYTES:
        raise Problem(
            413,
            "too_large",
            f"the job has {size} bytes; the bound is {JobSubmitted.MAX_BYTES}",
            [BadField("body", f"{size} bytes", "put long arguments, variables and labels into files")],
        )
    return event


def spec_digest(spec: JobSpec) -> str:
    """Equal for jobs with the same meaning, in any notation,
    whoever submits them and however long they are followed."""
    apart = ("tied_to", "tied_grace_ms", "parents")
    written = {name: value for name, value in as_written(spec).items() if name not in apart}
    canonical = json.dumps(written, sort_keys=True, ensure_ascii=False)
    return sha256(canonical.encode(errors="surrogatepass")).hexdigest()
