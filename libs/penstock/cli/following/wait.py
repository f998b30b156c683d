"""`penstock wait`: waits until jobs have ended, by one stream of events for all of them."""

from typing import Annotated

import typer

from penstock.cli.common import Output, find_job, gateway
from penstock.cli.completion import complete_job
from penstock.cli.output import Format, dump, duration, remark, short_id, state
from penstock.client import Client, Job, WaitTimeout
from penstock.exits import Exit, Stop
from penstock.screen import console
from penstock.sdk.job_file.units import duration_ms

Jobs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB…",
        help="Ids, prefixes of ids, or names (then the latest job).",
        autocompletion=complete_job,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(metavar="10m", help="Give up after this time; the jobs continue. By default never."),
]


def wait(ctx: typer.Context, jobs: Jobs, timeout: Timeout = None, output: Output = Format.TABLE) -> None:
    """Wait until jobs have ended; exits with the code of the first job that did not succeed."""
    limit_s = _limit_s(timeout)
    client = gateway(ctx)
    ids = list(dict.fromkeys(_meant(client, text) for text in jobs))
    ended: dict[str, Job] = {}
    quiet = output in (Format.JSON, Format.YAML)
    expired: WaitTimeout | None = None
    try:
        for job in client.ended(ids, timeout_s=limit_s):
            ended[job.job_id] = job
            if not quiet:
                line = f"{short_id(job.job_id)}  {state(str(job.outcome))}  {job.name or '–'}"
                console().print(line, soft_wrap=True)
    except WaitTimeout as error:
        expired = error
    if quiet:
        dump({"jobs": [client.find(job_id, ended=True) for job_id in ids if job_id in ended]}, output)
    if expired is not None:
        raise expired
    codes = (ended[job_id].code for job_id in ids)
    raise typer.Exit(int(next((code for code in codes if code), Exit.OK)))


def _meant(client: Client, text: str) -> str:
    """The id of the job; of a name it prints on stderr which job that is."""
    job = find_job(client, text)
    job_id = str(job["job_id"])
    if not job_id.startswith(text):
        ago = duration(max(0, job["now_ms"] - job["submitted_ms"]))
        remark(f"{text}: waits for {job_id}, the latest job of this name, submitted {ago} ago")
    return job_id


def _limit_s(timeout: str | None) -> float | None:
    """Raises `Stop`."""
    try:
        return None if timeout is None else duration_ms(timeout) / 1_000
    except ValueError as error:
        raise Stop(Exit.BAD_SPEC, f"--timeout: {error}") from error
