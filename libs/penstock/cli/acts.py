"""What users do to jobs that are submitted: cancel, hold, release. Who acted and why is stored with it."""

from typing import Annotated

import typer

from penstock.cli.common import Output, find_job_id, gateway
from penstock.cli.completion import complete_job
from penstock.cli.output import Format, dump, remark
from penstock.exits import Stop
from penstock.screen import console

Jobs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB…", help="Ids, starts of them, or names (then the latest).", autocompletion=complete_job
    ),
]


def cancel(
    ctx: typer.Context,
    jobs: Jobs,
    reason: Annotated[str, typer.Option(help="Stored with the cancellation.")] = "asked by the user",
    output: Output = Format.TABLE,
) -> None:
    """Cancel jobs: SIGTERM, their grace, SIGKILL."""
    _act(ctx, "cancel", jobs, reason, output, "asked to stop; `penstock watch {id}` follows it to its end")


Reason = Annotated[str, typer.Option(metavar="TEXT", help="Stored with it; `why` shows it.")]


def hold(ctx: typer.Context, jobs: Jobs, reason: Reason = "", output: Output = Format.TABLE) -> None:
    """Hold jobs: they do not start until they are released. What runs of them runs on."""
    done = "does not start until `penstock release {id}`; what runs of it runs on"
    _act(ctx, "hold", jobs, reason, output, done)


def release(ctx: typer.Context, jobs: Jobs, reason: Reason = "", output: Output = Format.TABLE) -> None:
    """Release jobs that are held: they wait at their place by submission."""
    _act(ctx, "release", jobs, reason, output, "released")


def _act(ctx: typer.Context, act: str, jobs: list[str], reason: str, output: Format, done: str) -> None:
    """Does it to each; what fails for one is printed, and the others are acted on. Ends with the first failure's code."""
    client = gateway(ctx)
    answers, failed = [], []
    jobs = list(dict.fromkeys(jobs))
    for job in jobs:
        try:
            job_id = find_job_id(client, job)
            answers.append(client.post(f"/v1/jobs/{job_id}/{act}", {"reason": reason}))
            if output in (Format.TABLE, Format.WIDE):
                console().print(f"{job_id}: {done.format(id=job_id)}", markup=False, soft_wrap=True)
        except Stop as stop:
            if len(jobs) == 1:
                raise
            failed.append(stop)
            remark(f"penstock: {stop}")
    if output in (Format.JSON, Format.YAML):
        dump(answers[0] if len(jobs) == 1 else {"jobs": answers}, output)
    if failed:
        raise typer.Exit(failed[0].code)
