"""Bodies of requests that act on nodes and jobs: a reason. Who acts follows from the token, never from the body. Pure."""

import orjson
from pydantic import ValidationError

from penstock.model.external_events import JobCancelRequested, JobHoldRequested, JobReleaseRequested
from penstock.model.types import ShortText, Value
from penstock.model.validation import checked
from penstock_services.gateway.core.problems import BadField, Problem, bad_fields, invalid

EXAMPLE = 'send {"reason": "…"}'
FROM_THE_TOKEN = ("by", "tenant")


class Act(Value, frozen=True, kw_only=True):
    """Why."""

    reason: ShortText | None = None


def read_act(body: bytes) -> Act:
    """The body, which may be empty. Raises `Problem` with every bad field."""
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise invalid("this is no request", [BadField("body", str(error), EXAMPLE)]) from error
    if not isinstance(fields, dict):
        raise invalid("this is no request", [BadField("body", "is no object", EXAMPLE)])
    if named := [name for name in FROM_THE_TOKEN if name in fields]:
        raise _named(named)
    try:
        found: Act = checked(Act, fields)
    except ValidationError as error:
        raise invalid("this is no request", bad_fields(error)) from error
    return found


def check_command(event: JobCancelRequested | JobHoldRequested | JobReleaseRequested) -> None:
    """One that was handed in as an event. Raises `Problem` where it names who acts."""
    if event.by or event.tenant is not None:
        raise _named([f"data.{name}" for name in FROM_THE_TOKEN if getattr(event, name)])


def _named(fields: list[str]) -> Problem:
    wrong = [BadField(field, "follows from the token", f"remove `{field}`") for field in fields]
    return invalid("this is no request", wrong)
