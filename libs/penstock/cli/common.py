"""What every command shares: the gateway of this call, `-o`, and finding a job by id, prefix or name."""

from typing import Annotated, Any, cast

import typer

from penstock.cli.output import Format
from penstock.cli.session import Session
from penstock.client import Client
from penstock.exits import Exit, Stop

Output = Annotated[
    Format, typer.Option("--output", "-o", help="wide: more columns; json, yaml: the gateway's own data.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, the start of one, or a name.")]


def gateway(ctx: typer.Context) -> Client:
    """The gateway that this command talks to; closed when the command ends."""
    found = cast(Session, ctx.find_root().obj).gateway()
    ctx.call_on_close(found.close)
    return found


def find_job(client: Client, text: str) -> dict[str, Any]:
    """The job with this id; else the latest of this name; else the only one whose id starts so. Raises `Stop`."""
    return client.find(text)


def find_job_id(client: Client, text: str) -> str:
    """The id of that job. Where this token may not read, the text is taken for an id, which the gateway judges. Raises `Stop`."""
    try:
        return str(find_job(client, text)["job_id"])
    except Stop as stop:
        if stop.code != Exit.NOT_ALLOWED:
            raise
        return text


def rows_of(answer: Any, name: str) -> list[dict[str, Any]]:
    """The rows in a listing's answer."""
    return cast(list[dict[str, Any]], answer[name])
