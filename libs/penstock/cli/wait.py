"""`penstock wait`: until jobs have ended, by one stream of events for all of them."""

from typing import Annotated, Any

import typer

from penstock.cli import follow
from penstock.cli.common import Output, find_job, gateway
from penstock.cli.completion import complete_job
from penstock.cli.output import Format, dump, short_id, state
from penstock.cli.signals import Expired, time_limit
from penstock.exits import Exit, Stop
from penstock.screen import console
from penstock.sdk.units import duration_ms

Jobs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB…", help="Ids, starts of them, or names (then the latest).", autocompletion=complete_job
    ),
]
Timeout = Annotated[
    str | None, typer.Option(metavar="10m", help="Give up after so long; the jobs go on. By default never.")
]


def wait(ctx: typer.Context, jobs: Jobs, timeout: Timeout = None, output: Output = Format.TABLE) -> None:
    """Wait until jobs have ended; ends with the code of the first of them that did not succeed."""
    limit_ms = _limit_ms(timeout)
    client = gateway(ctx)
    ids = list(dict.fromkeys(find_job(client, name)["job_id"] for name in jobs))
    ended: dict[str, dict[str, Any]] = {}
    quiet = output in (Format.JSON, Format.YAML)
    expired = False
    try:
        with time_limit(limit_ms):
            for job_id in client.ended(ids):
                job = ended[job_id] = client.get(f"/v1/jobs/{job_id}")
                if not quiet:
                    line = f"{short_id(job['job_id'])}  {state(job['outcome'])}  {job['name'] or '–'}"
                    console().print(line, soft_wrap=True)
    except Expired:
        expired = True
    if quiet:
        dump({"jobs": [ended[job_id] for job_id in ids if job_id in ended]}, output)
    if expired:
        left = f"{len(ids) - len(ended)} of {len(ids)} jobs have not ended within {timeout}"
        raise Stop(Exit.WAIT_TIMEOUT, f"{left}; they go on")
    codes = (follow.exit_code(ended[job_id], propagate=False) for job_id in ids)
    raise typer.Exit(int(next((code for code in codes if code), Exit.OK)))


def _limit_ms(timeout: str | None) -> int | None:
    """Raises `Stop`."""
    try:
        return None if timeout is None else duration_ms(timeout)
    except ValueError as error:
        raise Stop(Exit.BAD_SPEC, f"--timeout: {error}") from error
