"""Acting and checking: cancel, doctor, projections, replay."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.client import Gateway
from penstock.cli.common import JobArgument, Output, find_job, gateway, rows_of
from penstock.cli.output import Format, dump, present
from penstock.exits import Exit, Stop
from penstock.screen import plain_table

MIN_PYTHON = (3, 11)
MAX_LAG_RECORDS = 1_000  # behind the ledger; far below a second of work for the projector
REPLAY_PATIENCE_S = 600.0  # a replay folds tens of thousands of records per second, and decides on each
NVIDIA_SMI_TIMEOUT_S = 10.0


def cancel(
    ctx: typer.Context,
    job: JobArgument,
    reason: Annotated[str, typer.Option(help="Stored with the cancellation.")] = "asked by the user",
    output: Output = Format.TABLE,
) -> None:
    """Cancel a job: SIGTERM, its grace, SIGKILL."""
    client = gateway(ctx)
    job_id = find_job(client, job)["job_id"]
    answer = client.post(f"/v1/jobs/{job_id}/cancel", {"reason": reason})
    text = f"{job_id}: asked to stop; `penstock watch {job_id}` follows it to its end"
    present(answer, output, lambda: Text(text))


class Finding(NamedTuple):
    """One check. `remedy` is empty when it passed."""

    what: str
    well: bool
    told: str
    remedy: str = ""


def doctor(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Check this machine and the gateway behind it; exit code 1 when something is wrong."""
    findings = list(_look(gateway(ctx)))
    present({"findings": [finding._asdict() for finding in findings]}, output, lambda: _table(findings))
    if not all(finding.well for finding in findings):
        raise typer.Exit(int(Exit.PROBLEM))


def _table(findings: list[Finding]) -> Table:
    table = plain_table("", "", "")
    table.show_header = False
    table.columns[2].no_wrap = False
    for finding in findings:
        mark = "[green]✓[/]" if finding.well else "[red]✗[/]"
        remedy = f"\n[bold]→[/] {escape(finding.remedy)}" if finding.remedy else ""
        table.add_row(mark, finding.what, escape(finding.told) + remedy)
    return table


def _look(client: Gateway) -> Iterator[Finding]:
    version = platform.python_version()
    well = sys.version_info[:2] >= MIN_PYTHON
    yield Finding("Python", well, version, "" if well else "use Python 3.11 or newer")
    yield _gpus_here()
    try:
        status = client.get("/v1/status")
    except Stop as stop:
        yield Finding("gateway", False, str(stop).partition(";")[0], str(stop).partition("; ")[2])
        return
    yield Finding("gateway", True, client.server)
    yield from _services(status)
    nodes = rows_of(client.get("/v1/nodes"), "nodes")
    ready = [node for node in nodes if node["status"] == "ready"]
    silent = [node["node_id"] for node in nodes if node["status"] == "suspect"]
    yield Finding(
        "nodes",
        bool(ready),
        f"{len(ready)} of {len(nodes)} ready",
        "" if ready else "start a node-reporter, or everything on this machine with `penstock up`",
    )
    if silent:
        yield Finding("silent", False, ", ".join(silent), "look at these machines and their node-reporters")


def _services(status: dict[str, Any]) -> Iterator[Finding]:
    """State of the other services: the deciding placer, the lag of the read models, dead letters."""
    term, profile = status["term"], status["profile"]
    yield Finding(
        "placer",
        term > 0,
        f"term {term}, profile {profile}, {status['seq']} records" if term else "has never decided",
        "" if term else "start the placer and look at its log",
    )
    frozen = status["frozen"]
    if frozen:
        yield Finding(
            "frozen", False, frozen, "look at the nodes that vanished; placing resumes when they return"
        )
    for name, service in (("projector_lag", "read models"), ("gateway_lag", "gateway's view")):
        lag = status[name]
        well = lag <= MAX_LAG_RECORDS
        remedy = "" if well else f"it is behind the ledger: look at the log of the {name.partition('_')[0]}"
        yield Finding(service, well, "up to date" if lag == 0 else f"{lag} records behind the ledger", remedy)
    letters = status["dead_letters"]
    yield Finding(
        "dead letters",
        letters == 0,
        str(letters) if letters else "none",
        "read the topic penstock.deadletters.v1: each holds its reason" if letters else "",
    )


def _gpus_here() -> Finding:
    """Real GPUs are a possibility, not a duty: their absence is no fault."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("GPUs here", True, "no NVIDIA driver on this machine; `penstock up` uses virtual GPUs")
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            "GPUs here", False, f"nvidia-smi: {error}", "repair the NVIDIA driver, or use virtual GPUs"
        )
    if listed.returncode != 0:
        return Finding(
            "GPUs here", False, (listed.stdout or listed.stderr).strip()[:200], "repair the NVIDIA driver"
        )
    if importlib.util.find_spec("pynvml") is None:
        return Finding(
            "GPUs here",
            False,
            "the driver is there, nvidia-ml-py is not",
            "pip install 'penstock[node-reporter]'",
        )
    return Finding(
        "GPUs here", True, f"{len(listed.stdout.splitlines())} by NVML; `penstock up --real` uses them"
    )


def verify(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Replay the ledger and compare the read models with it row by row; exit code 1 when they differ."""
    _verdict(gateway(ctx).post("/v1/projections/verify"), output)


def rebuild(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Empty the read models and fill them again from the ledger."""
    _verdict(gateway(ctx).post("/v1/projections/rebuild"), output)


def _verdict(answer: dict[str, Any], output: Format) -> None:
    dump(answer, Format.YAML if output in (Format.TABLE, Format.WIDE) else output)
    if answer.get("ok") is False:
        raise typer.Exit(int(Exit.PROBLEM))


def replay(
    ctx: typer.Context,
    until: Annotated[int | None, typer.Option(metavar="SEQ", min=0, help="Up to this ledger record.")] = None,
    decision: Annotated[
        str | None, typer.Option(metavar="ID", help="A record's seq or a job: show it as decided again.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Decide everything again from the log and compare byte for byte; exit code 1 when something differs."""
    client = gateway(ctx)
    _verdict(client.get("/v1/replay", patience_s=REPLAY_PATIENCE_S, until=until, decision=decision), output)
