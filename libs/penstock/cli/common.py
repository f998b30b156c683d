"""What every command shares: the gateway of this call, `-o`, and finding a job by id, prefix or name."""

from typing import Annotated, Any, cast

import typer

from penstock.cli.client import Gateway
from penstock.cli.output import Format
from penstock.cli.session import Session
from penstock.exits import Exit, Stop

MAX_SEARCHED = 1_000  # the gateway's bound of one page; older jobs are found by their whole id

Output = Annotated[
    Format, typer.Option("--output", "-o", help="wide: more columns; json, yaml: the gateway's own data.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, the start of one, or a name.")]


def gateway(ctx: typer.Context) -> Gateway:
    """The gateway that this command talks to; closed when the command ends."""
    found = cast(Session, ctx.find_root().obj).gateway()
    ctx.call_on_close(found.close)
    return found


def find_job(client: Gateway, text: str) -> dict[str, Any]:
    """The job with this id; else the only one whose id starts so; else the latest of this name. Raises `Stop`."""
    try:
        return cast(dict[str, Any], client.get(f"/v1/jobs/{text}"))
    except Stop as stop:
        if stop.code != Exit.PROBLEM:
            raise
        missing = stop
    jobs = rows_of(client.get("/v1/jobs", limit=MAX_SEARCHED), "jobs")
    named = [job for job in jobs if job["name"] == text]
    if named:
        latest = max(named, key=lambda job: (job["submitted_ms"], job["job_id"]))
        return cast(dict[str, Any], client.get(f"/v1/jobs/{latest['job_id']}"))
    starting = [job for job in jobs if job["job_id"].startswith(text)]
    if len(starting) == 1:
        return cast(dict[str, Any], client.get(f"/v1/jobs/{starting[0]['job_id']}"))
    if starting:
        some = ", ".join(job["job_id"] for job in starting[:3])
        raise Stop(Exit.PROBLEM, f"job {text}: {len(starting)} ids start so ({some}, …); give more of it")
    raise Stop(Exit.PROBLEM, f"job {text}: not found; `penstock get jobs` lists them") from missing


def find_job_id(client: Gateway, text: str) -> str:
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
