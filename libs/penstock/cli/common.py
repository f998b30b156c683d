"""Shared parts of the commands: the gateway of this call, `-o`,
and the search for a job by id, prefix or name."""

import re
import threading
from typing import Annotated, Any, cast

import typer

from penstock.cli.completion import complete_job, complete_node
from penstock.cli.output import Format
from penstock.cli.session import Session
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.model.nouns.transitions import JobStatus
from penstock.text.suggestion import choices

CLOSE_S = 1.0  # a client on this machine is closed within a millisecond

Output = Annotated[
    Format, typer.Option("--output", "-o", help="wide: more columns; json, yaml: the gateway's own data.")
]
_JOB = typer.Argument(
    metavar="JOB", help="A job's id, a prefix of it, or a name.", autocompletion=complete_job
)
JobArgument = Annotated[str, _JOB]
MaybeJobArgument = Annotated[str | None, _JOB]

STATES = [str(status) for status in JobStatus]
StateFilter = Annotated[
    str | None,
    typer.Option(
        "--state",
        help="Only jobs in this state, such as running.",
        autocompletion=lambda incomplete: [name for name in STATES if name.startswith(incomplete)],
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", autocompletion=complete_node)]
OwnerFilter = Annotated[str | None, typer.Option("--owner", help="Only jobs of this owner.")]
NameFilter = Annotated[str | None, typer.Option("--name", help="Only jobs of this name.")]
LabelFilter = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME=VALUE", help="Only jobs with this label; may be repeated."),
]


def chosen(state: str | None, owner: str | None, name: str | None, label: list[str] | None) -> dict[str, Any]:
    """Filters as the gateway's parameters. Raises `Stop` for a state that does not exist."""
    state = None if state is None else state.lower()
    if state is not None and state not in STATES:
        raise Stop(Exit.BAD_SPEC, f"--state {state}: is not known; {choices(state, STATES)}")
    for text in label or ():
        if not re.match("[^=]*[^=!]=", text):
            remedy = "give the whole label, such as team=vision; != and names alone are not known"
            raise Stop(Exit.BAD_SPEC, f"--label {text}: is not NAME=VALUE; {remedy}")
    filters = {"status": state, "owner": owner, "name": name, "label": label or None}
    return {field: value for field, value in filters.items() if value is not None}


def gateway(ctx: typer.Context) -> Client:
    """The gateway that this command talks to; closed when the command ends.

    A signal may interrupt the client while it holds a lock, which then stays locked: closing it would wait
    for ever, so the command waits `CLOSE_S` at most. After a signal, use another client.
    """
    found = cast(Session, ctx.find_root().obj).gateway()
    closing = threading.Thread(target=found.close, name="closing", daemon=True)

    def close() -> None:
        closing.start()
        closing.join(CLOSE_S)

    ctx.call_on_close(close)
    return found


def find_job(client: Client, text: str) -> dict[str, Any]:
    """The job with this id; else the latest of this name; else the only one with this prefix of its id.
    Raises `Stop`."""
    return client.find(text)


def find_job_id(client: Client, text: str) -> str:
    """The id of that job. If this token may not read, the text is taken as an id, which the gateway checks.
    Raises `Stop`."""
    try:
        return client.job(text).job_id
    except Stop as stop:
        if stop.code != Exit.NOT_ALLOWED:
            raise
        return text


def rows_of(answer: Any, name: str) -> list[dict[str, Any]]:
    """The rows in a listing's answer."""
    return cast(list[dict[str, Any]], answer[name])
