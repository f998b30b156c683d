"""Commands on submitted jobs: cancel, hold, release, checkpoint, change cores, move. The user and the reason
are stored with each."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from penstock.cli.common import JobArgument, Output, find_job_id, gateway
from penstock.cli.completion import complete_job
from penstock.cli.following.event_text import checkpoint as saved_text
from penstock.cli.following.event_text import move as move_text
from penstock.cli.following.event_text import numbers
from penstock.cli.output import Format, dump, present, remark, short_id
from penstock.exits import Exit, Stop
from penstock.screen import console
from penstock.text.counting import count

Jobs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB…",
        help="Ids, prefixes of ids, or names (then the latest job).",
        autocompletion=complete_job,
    ),
]


def cancel(
    ctx: typer.Context,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB…",
            help="Ids, prefixes of ids, or names (then the latest job).",
            autocompletion=complete_job,
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Stored with the cancellation.")] = "asked by the user",
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The job submitted under this key; code 0 if there is none."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Cancel jobs: SIGTERM, their grace, SIGKILL."""
    if bool(jobs) == (idempotency_key is not None):
        raise Stop(Exit.BAD_SPEC, "name the jobs to cancel, or give --idempotency-key")
    if not jobs:
        headers = {"Idempotency-Key": str(idempotency_key)}
        found = gateway(ctx).post("/v1/jobs/cancel", {"reason": reason}, headers=headers)
        job_id, text = found["job_id"], "asked to stop"
        if "links" not in found:
            text = "no job has this key" if job_id is None else f"has ended: {found['outcome']}"
            text += "; nothing to cancel"
        present(found, output, lambda: Text(text if job_id is None else f"{job_id}: {text}"))
        return
    _act(ctx, "cancel", jobs, reason, output, "asked to stop; `penstock watch {id}` follows it to its end")


def retry(ctx: typer.Context, job: JobArgument, output: Output = Format.TABLE) -> None:
    """Submit a job that has ended once more: the same job under a new id, which is printed."""
    client = gateway(ctx)
    job_id = find_job_id(client, job)
    key = {"Idempotency-Key": f"retry-{secrets.token_hex(16)}"}
    found = client.post(f"/v1/jobs/{job_id}/retry", headers=key)
    for warning in found.get("warnings", ()):
        remark(f"warning: {warning['field']} {warning['message']}; {warning['remedy']}")
    present({**found, "retry_of": job_id}, output, lambda: Text(found["job_id"]))


Reason = Annotated[str, typer.Option(metavar="TEXT", help="Stored with the command; `why` shows it.")]


def hold(ctx: typer.Context, jobs: Jobs, reason: Reason = "", output: Output = Format.TABLE) -> None:
    """Hold jobs: they do not start until they are released. Running attempts continue."""
    done = "does not start until `penstock release {id}`; what runs of it runs on"
    _act(ctx, "hold", jobs, reason, output, done)


def release(ctx: typer.Context, jobs: Jobs, reason: Reason = "", output: Output = Format.TABLE) -> None:
    """Release held jobs: they queue at their place by submission."""
    _act(ctx, "release", jobs, reason, output, "released")


def checkpoint(
    ctx: typer.Context, job: JobArgument, reason: Reason = "", output: Output = Format.TABLE
) -> None:
    """Ask a running job to save a checkpoint; it continues to train."""
    client = gateway(ctx)
    job_id = find_job_id(client, job)
    found = client.post(f"/v1/jobs/{job_id}/checkpoint", {"reason": reason})
    saved = found["checkpoint"]
    asked = (
        f"asked to save; `penstock describe job {short_id(job_id)}` shows the checkpoint when it is reported"
    )
    present(found, output, lambda: Text(asked if saved is None else saved_text(saved)))


def cores(
    ctx: typer.Context,
    job: JobArgument,
    number: Annotated[int, typer.Argument(metavar="N", min=1, help="Cores of each worker.")],
    task: Annotated[str | None, typer.Option(metavar="w0", help="Only this task.")] = None,
    reason: Reason = "",
    output: Output = Format.TABLE,
) -> None:
    """Give each running worker of a job N cores, until this attempt ends. For operators."""
    client = gateway(ctx)
    job_id = find_job_id(client, job)
    asked = {"cores": number, "reason": reason} | ({} if task is None else {"task": task})
    found = client.post(f"/v1/jobs/{job_id}/cores", asked)
    present(found, output, lambda: Text("\n".join(map(_has, found["tasks"]))))
    if any(row["problem"] for row in found["tasks"]):
        raise typer.Exit(Exit.PROBLEM)


def _has(row: Mapping[str, Any]) -> str:
    """`w0: 4 cores (0–3), by cpuset`."""
    name = row["task_id"].rpartition(".")[2]
    has = f"{name}: {count(len(row['cores']), 'core')} ({numbers(row['cores'])})"
    if row["problem"]:
        return (
            f"{has}, but its node could not: {row['problem']}"
            if row["cores"]
            else f"{name}: {row['problem']}"
        )
    return (
        f"{has}, by {row['enforced'] or 'its placement'}"
        if row["applied"]
        else f"{has}; its node has not answered yet"
    )


def move(
    ctx: typer.Context,
    job: JobArgument,
    to: Annotated[
        str,
        typer.Option(metavar="NODE[,NODE…]", help="Node of each task in rank order, or one for all of them."),
    ],
    reason: Reason = "",
    output: Output = Format.TABLE,
) -> None:
    """Move a running job: it saves, stops and resumes on the given nodes, which are reserved for it
    meanwhile. For operators."""
    client = gateway(ctx)
    job_id = find_job_id(client, job)
    nodes = [node.strip() for node in to.split(",")]
    found = client.post(f"/v1/jobs/{job_id}/move", {"to": nodes, "reason": reason})
    text = "asked for; the placer has not decided yet" if found["move"] is None else move_text(found["move"])
    present(found, output, lambda: Text(f"{text}; `penstock watch {short_id(job_id)}` follows it"))
    if found["move"] is not None and found["move"]["problem"]:
        raise typer.Exit(Exit.PROBLEM)


def _act(ctx: typer.Context, act: str, jobs: list[str], reason: str, output: Format, done: str) -> None:
    """Applies the act to each job; a failure is printed and the next job follows. Ends with the first
    failure's code."""
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
