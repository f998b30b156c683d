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
from penstock.cli.common import JobArgument, Output, find_job_id, gateway, rows_of
from penstock.cli.output import Format, dump, duration, present
from penstock.cli.tables import isolation
from penstock.exits import Exit, Stop
from penstock.screen import plain_table

MIN_PYTHON = (3, 11)
MAX_NAMED = 4  # nodes of one kind
MAX_LAG_RECORDS = 1_000  # behind the ledger; far below a second of work for the projector
MAX_CLOCK_STEP_MS = 120_000  # beyond what records are under way
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
    job_id = find_job_id(client, job)
    answer = client.post(f"/v1/jobs/{job_id}/cancel", {"reason": reason})
    text = f"{job_id}: asked to stop; `penstock watch {job_id}` follows it to its end"
    present(answer, output, lambda: Text(text))


class Finding(NamedTuple):
    """One check, with what was found. `remedy` is empty when it passed."""

    what: str
    found: str
    remedy: str = ""


def doctor(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """Check this machine and the gateway behind it; exit code 1 when something is wrong."""
    findings = list(_look(gateway(ctx)))
    rows = [
        {"what": what, "well": not remedy, "told": found, "remedy": remedy}
        for what, found, remedy in findings
    ]
    present({"findings": rows}, output, lambda: _table(findings))
    if any(finding.remedy for finding in findings):
        raise typer.Exit(int(Exit.PROBLEM))


def _table(findings: list[Finding]) -> Table:
    table = plain_table("", "", "")
    table.show_header = False
    table.columns[2].no_wrap = False
    for what, found, remedy in findings:
        mark = "[red]✗[/]" if remedy else "[green]✓[/]"
        table.add_row(mark, what, escape(found) + (f"\n[bold]→[/] {escape(remedy)}" if remedy else ""))
    return table


def _look(client: Gateway) -> Iterator[Finding]:
    new = sys.version_info[:2] >= MIN_PYTHON
    yield Finding("Python", platform.python_version(), "" if new else "use Python 3.11 or newer")
    yield _gpus_here()
    try:
        status = client.get("/v1/status")
    except Stop as stop:
        problem, _, remedy = str(stop).partition("; ")
        yield Finding("gateway", problem, remedy or "look at the gateway's log")
        return
    yield Finding("gateway", client.server)
    yield from _services(status)
    yield _ledger(client.get("/v1/ledger"))
    nodes = rows_of(client.get("/v1/nodes"), "nodes")
    ready = [node for node in nodes if node["status"] == "ready"]
    silent = [node["node_id"] for node in nodes if node["status"] == "suspect"]
    start = "start a node-reporter, or everything on this machine with `penstock up`"
    gone = [node["node_id"] for node in nodes if node["status"] == "gone"]
    left = f"; gone: {', '.join(gone[:MAX_NAMED])}{' …' if len(gone) > MAX_NAMED else ''}" if gone else ""
    yield Finding("nodes", f"{len(ready)} of {len(nodes)} ready{left}", "" if ready else start)
    yield from _isolation(nodes)
    if silent:
        yield Finding("silent", ", ".join(silent), "look at these machines and their node-reporters")


def _ledger(ledger: dict[str, Any]) -> Finding:
    """Whether all of it can be read, from the log and its archive."""
    archive = ledger["archive"]
    found = f"offsets {ledger['begin']} to {ledger['end']} in the log"
    if archive:
        found += f", {archive['begin']} to {archive['end']} in {archive['folder']}"
    remedy = "give the gateway the archive's directory as PENSTOCK_ARCHIVE, whole; `penstock-placer verify-archive` reads it all"
    return (
        Finding("ledger", f"{found}; {ledger['problem']}", remedy)
        if ledger["problem"]
        else Finding("ledger", found)
    )


def _isolation(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    """What nodes enforce on tasks, one line per kind of node."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        kinds.setdefault(isolation(node), []).append(node)
    for what, alike in sorted(kinds.items()):
        names = ", ".join(node["node_id"] for node in alike[:MAX_NAMED])
        more = f" and {len(alike) - MAX_NAMED} more" if len(alike) > MAX_NAMED else ""
        remedy = ""
        if not alike[0].get("shares_gpus", True):
            why = alike[0]["isolation"]["reason"]
            remedy = f"GPUs are not shared there: let the node-reporter make PID namespaces, or give it a cgroup ({why})"
        yield Finding("isolation", f"{names}{more}: {what}", remedy)


def _services(status: dict[str, Any]) -> Iterator[Finding]:
    """State of the other services: the deciding placer, the lag of the read models, dead letters."""
    term, profile = status["term"], status["profile"]
    if term:
        yield Finding("placer", f"term {term}, profile {profile}, {status['seq']} records")
    else:
        yield Finding("placer", "has never decided", "start the placer and look at its log")
    if status["frozen"]:
        remedy = "look at the nodes that vanished; placing resumes when they return"
        yield Finding("frozen", status["frozen"], remedy)
    yield from _clock(status)
    failed = status["failed_choices"]
    if failed["count"]:
        about = f", at last of {failed['job_id']}" if failed["job_id"] else ""
        found = f"{failed['count']} failed{about} in record {failed['seq']}: {failed['error']}"
        remedy = (
            "this is a bug: read the placer's log; a restart under another PENSTOCK_PROFILE places meanwhile"
        )
        yield Finding("choices", found, remedy)
    for name, service in (("projector_lag", "read models"), ("gateway_lag", "gateway's view")):
        lag, late = status[name], f"it is behind the ledger: look at the log of the {name.partition('_')[0]}"
        found = f"{lag} records behind the ledger" if lag else "up to date"
        yield Finding(service, found, late if lag > MAX_LAG_RECORDS else "")
    letters = status["dead_letters"]
    remedy = "read the topic penstock.deadletters.v1: each holds its reason" if letters else ""
    yield Finding("dead letters", str(letters or "none"), remedy)


def _clock(status: dict[str, Any]) -> Iterator[Finding]:
    """The ledger's time against the log's clock, at the latest record: it does not follow steps."""
    if status["log_ms"] is None:
        return
    ahead_ms = status["now_ms"] - status["log_ms"]
    if abs(ahead_ms) <= MAX_CLOCK_STEP_MS:
        yield Finding("clock", "the ledger's time is the log's")
        return
    way = "ahead of" if ahead_ms > 0 else "behind"
    yield Finding(
        "clock",
        f"the ledger's time is {duration(abs(ahead_ms))} {way} the log's clock; deadlines go by the time since boot",
        "a clock was or is wrong: look at the placer's log, and set the clocks of its machine and of the log's (NTP)",
    )


def _gpus_here() -> Finding:
    """Real GPUs are a possibility, not a duty: their absence is no fault."""
    here = "GPUs here"
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding(here, "no NVIDIA driver on this machine; `penstock up` uses virtual GPUs")
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(here, f"nvidia-smi: {error}", "repair the NVIDIA driver, or use virtual GPUs")
    if listed.returncode != 0:
        return Finding(here, (listed.stdout or listed.stderr).strip()[:200], "repair the NVIDIA driver")
    if importlib.util.find_spec("pynvml") is None:
        remedy = "pip install 'penstock[node-reporter]'"
        return Finding(here, "the driver is there, nvidia-ml-py is not", remedy)
    return Finding(here, f"{len(listed.stdout.splitlines())} by NVML; `penstock up --real` uses them")


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
