"""Request bodies of commands on nodes and jobs: a reason, and the command's fields. The caller follows from
the token, never from the body. Pure."""

from typing import Annotated, TypeVar

import orjson
from msgspec import Meta
from pydantic import ValidationError

from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobCheckpointRequested,
    JobHoldRequested,
    JobReleaseRequested,
)
from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GANG_TASKS,
    MAX_TEXT,
    Identifier,
    ShortText,
    Value,
)
from penstock.model.proposals import CoresProposed, MigrationProposed, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.model.schema.validation import checked
from penstock_services.gateway.core.problems import BadField, Problem, bad_fields, invalid

EXAMPLE = 'send {"reason": "…"}'
FROM_THE_TOKEN = ("by", "tenant")
TerminalSize = Annotated[str, Meta(pattern=r"^[0-9]{1,4}x[0-9]{1,4}\Z")]


class Act(Value, frozen=True, kw_only=True):
    """Why."""

    reason: ShortText | None = None


class CoresAct(Act, frozen=True, kw_only=True):
    """How many cores, and why."""

    cores: Annotated[int, Meta(ge=1, le=MAX_CORES_PER_NODE)]
    task: Identifier | None = None
    """Id of one task, or its end such as `w0`; None: every worker."""


class MoveAct(Act, frozen=True, kw_only=True):
    """Where to, and why."""

    to: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Node of each task in rank order; a single one is that of all."""


class ExecAct(Value, frozen=True, kw_only=True):
    """What to run, and where."""

    command: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_TEXT)], ...], Meta(min_length=1, max_length=512)
    ]
    """An argv list; never handed to a shell."""
    task: Identifier | None = None
    """Id of one task, or its end such as `w0`; None: the only one that runs."""
    stdin: bool = False
    """It gets what the caller sends."""
    terminal: TerminalSize | None = None
    """Rows and columns of its terminal, such as `24x80`; None: it has pipes."""
    term: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}\Z")] = "dumb"
    """Kind of the terminal, as in TERM."""

    def __post_init__(self) -> None:
        if any("\0" in text for text in self.command) or not self.command[0]:
            raise ValueError(
                "command: the program has no name, or an argument has a zero byte; leave them out"
            )


class AttachAct(Value, frozen=True, kw_only=True):
    """Which terminal to attach to, and how large the caller's is."""

    task: Identifier | None = None
    """As of `ExecAct`."""
    terminal: TerminalSize


A = TypeVar("A", bound=Value)


def read_act(body: bytes) -> Act:
    """The body, which may be empty. Raises `Problem` with every bad field."""
    return read_fields(body, Act)


def read_cores(body: bytes) -> CoresAct:
    """Raises `Problem` with every bad field."""
    return read_fields(body, CoresAct)


def read_move(body: bytes) -> MoveAct:
    """Raises `Problem` with every bad field."""
    return read_fields(body, MoveAct)


def read_fields(body: bytes, kind: type[A]) -> A:
    """Raises `Problem` with every bad field."""
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise invalid("this is not a request", [BadField("body", str(error), EXAMPLE)]) from error
    if not isinstance(fields, dict):
        raise invalid("this is not a request", [BadField("body", "is not an object", EXAMPLE)])
    if named := [name for name in FROM_THE_TOKEN if name in fields]:
        raise _named(named)
    try:
        found: A = checked(kind, fields)
    except ValidationError as error:
        raise invalid("this is not a request", bad_fields(error)) from error
    return found


def check_proposal(event: Event) -> None:
    """Checks a proposal that was sent as an event. Raises `Problem` where it names an operator."""
    if isinstance(event, CoresProposed | ThrottleProposed | MigrationProposed) and event.by:
        raise _named(["data.by"])


def check_command(
    event: JobCancelRequested | JobHoldRequested | JobReleaseRequested | JobCheckpointRequested,
) -> None:
    """Checks a command that was sent as an event. Raises `Problem` where it names its caller."""
    if event.by or event.tenant is not None:
        raise _named([f"data.{name}" for name in FROM_THE_TOKEN if getattr(event, name)])


def _named(fields: list[str]) -> Problem:
    wrong = [BadField(field, "follows from the token", f"remove `{field}`") for field in fields]
    return invalid("this is not a request", wrong)
