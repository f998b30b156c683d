"""`penstock estimator models` and `check`: the stored models, as the gateway lists them."""

from collections.abc import Mapping
from typing import Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from penstock.cli.common import JobArgument, Output, find_job, gateway, rows_of
from penstock.cli.output import Format, present
from penstock.cli.queries.tables import clock
from penstock.client.connection import WORKER_TIMEOUT_S
from penstock.exits import Exit, Stop
from penstock.screen import console, plain_table


def models(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """List the stored models: training data, accuracy, and which one is in use.

    Also whether each stored file is intact.
    """
    answer = gateway(ctx).get("/v1/estimator/models", patience_s=WORKER_TIMEOUT_S)
    _stop_at_error(answer)
    present(answer, output, lambda: _table(rows_of(answer, "models")))


def _table(rows: list[dict[str, Any]]) -> RenderableType:
    if not rows:
        return Text("No model yet: one is trained once 50 runs have finished.")
    table = plain_table(
        "VERSION", "KIND", "RUNS", "THEIR DATA", "ERROR", "", "STATE", right=("RUNS", "ERROR")
    )
    for row in rows:
        promoted = "in use" if row["in_use"] else "promoted" if row["promoted"] else "not promoted"
        whole = "[green]whole[/]" if row["whole"] else f"[red]damaged[/]: {escape(row['damage'])}"
        data = f"{clock(row['first_run_ms'])} to {clock(row['last_run_ms'])}"
        table.add_row(
            row["version"],
            row["kind"],
            f"{row['runs']:,}",
            data,
            _error(row["metrics"]),
            promoted,
            whole,
            style="bold" if row["in_use"] else "",
        )
    return table


def _error(metrics: Mapping[str, float]) -> str:
    """The error on the newest runs, which were held out of training;
    and the error of the model before it there."""
    for name in ("error", "step_error"):
        if name in metrics:
            before = metrics.get(f"before_{name}")
            return f"{metrics[name]:.3f}" + ("" if before is None else f" (before {before:.3f})")
    return "–"


def check(ctx: typer.Context, job: JobArgument, output: Output = Format.TABLE) -> None:
    """Repeat a job's estimate with the model that made it, and compare the two.

    The same version of the model is used. Exit code 1 if the estimates differ, or the model is no longer
    stored, or was changed.
    """
    client = gateway(ctx)
    found = find_job(client, job)
    answer = client.get(f"/v1/jobs/{found['job_id']}/estimate/check", patience_s=WORKER_TIMEOUT_S)
    _stop_at_error(answer)
    present(answer, output, lambda: _show(answer))
    if answer["ok"] is False:
        raise typer.Exit(int(Exit.PROBLEM))


def _show(answer: Mapping[str, Any]) -> None:
    screen = console()
    screen.print(
        f"[bold]{answer['job_id']}[/]  estimated in record {answer['estimated_seq']}", highlight=False
    )
    screen.print(f"[dim]{escape(answer['source'])}[/]", soft_wrap=True)
    for row in answer["models"]:
        mark = "[green]✓[/]" if row["verdict"] == "same" else "[red]✗[/]"
        as_of = "" if row["as_of"] is None else f" [dim](with what was known at record {row['as_of']})[/]"
        screen.print(f"{mark} {escape(row['text'])}{as_of}", soft_wrap=True)
    if not answer["models"]:
        screen.print(escape(answer["text"]), soft_wrap=True)


def _stop_at_error(answer: Mapping[str, Any]) -> None:
    """The gateway's command ended without an answer. Raises `Stop`."""
    if answer.get("error"):
        last = str(answer["error"]).splitlines()[-1]
        raise Stop(Exit.PROBLEM, last.removeprefix("penstock: "))
