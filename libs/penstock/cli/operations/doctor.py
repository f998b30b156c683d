"""Checks of the cell behind the gateway, for `penstock doctor` (`penstock.local.doctor.doctor`): services,
ledger, nodes."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from rich.markup import escape
from rich.table import Table

from penstock.cli.common import rows_of
from penstock.cli.output import duration
from penstock.cli.queries.tables import distrusted_for, isolation
from penstock.client import Client
from penstock.errors import ConfigurationError, PenstockError
from penstock.exits import Stop
from penstock.screen import plain_table
from penstock.text.installing import installing
from penstock.text.redaction import without_passwords

MAX_NAMED = 4  # nodes of one kind
MAX_LAG_RECORDS = 1_000  # behind the ledger; far below a second of work for the projector
MAX_CLOCK_STEP_MS = 120_000  # longer than records are under way


MAX_ASKED = 256  # nodes, one after the other: a second
SECRET = (
    "give this node's token to the gateway (`penstock token --node`), or both the same PENSTOCK_NODE_LOG_KEY"
)


class Finding(NamedTuple):
    """One check, with what was found. `remedy` is empty when it passed."""

    what: str
    found: str
    remedy: str = ""


Reach = Callable[[Sequence[tuple[str, str]]], Iterator[Finding]]


def checked(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of `look`; its error as a finding, with the remedy after the message's first `; `."""
    try:
        yield from look()
    except (PenstockError, OSError) as error:
        ours = isinstance(error, ConfigurationError)  # remedies may show the form of a URL, never a password
        problem, _, remedy = (str(error) if ours else without_passwords(str(error))).partition("; ")
        yield Finding(what, without_passwords(problem), remedy or f"mend the settings of: {what}")
    except ModuleNotFoundError as error:
        yield Finding(what, f"not checked: {error.name} is not installed", installing("local"))


def table_of(findings: Sequence[Finding]) -> Table:
    """A line per finding: mark, what was checked, what was found, the remedy below it."""
    table = plain_table("", "", "")
    table.show_header = False
    table.columns[2].no_wrap = False
    for what, found, remedy in findings:
        mark = "[red]✗[/]" if remedy else "[green]✓[/]"
        table.add_row(mark, what, escape(found) + (f"\n[bold]→[/] {escape(remedy)}" if remedy else ""))
    return table


def cell_findings(client: Client, reach: Reach | None = None) -> Iterator[Finding]:
    """Checks behind the gateway: services, ledger, nodes.
    `reach`: tries the nodes' log servers from here (`log_server_findings`)."""
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
    ready = [node for node in nodes if node["status"] == "ready" and not _suspect(node)]
    silent = [node["node_id"] for node in nodes if node["status"] == "suspect"]
    start = "start a node-reporter, or everything on this machine with `penstock up`"
    gone = [node["node_id"] for node in nodes if node["status"] == "gone"]
    left = f"; gone: {', '.join(gone[:MAX_NAMED])}{' …' if len(gone) > MAX_NAMED else ''}" if gone else ""
    yield Finding("nodes", f"{len(ready)} of {len(nodes)} ready{left}", "" if ready else start)
    yield from _addresses(nodes)
    yield from _outputs(client, [node["node_id"] for node in ready], reach)
    yield from _isolation(nodes)
    yield from suspects(nodes)
    if silent:
        yield Finding("silent", ", ".join(silent), "look at these machines and their node-reporters")


def suspects(nodes: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Nodes on which jobs fail, or on GPUs of which."""
    for node in nodes:
        if text := distrusted_for(node):
            name = node["node_id"]
            remedy = (
                f"look at it (disk, mounts, driver), then `penstock node uncordon {name}`; else its "
                "probes go on"
            )
            yield Finding("suspect", f"{name}: {text}", remedy)


def _suspect(node: dict[str, Any]) -> bool:
    """Whether jobs fail there, wherever on the node."""
    return bool(node.get("distrust")) and not node["distrust"]["gpus"]


def _ledger(ledger: dict[str, Any]) -> Finding:
    """Whether the whole ledger can be read, from the log and its archive."""
    archive = ledger["archive"]
    found = f"offsets {ledger['begin']} to {ledger['end']} in the log"
    if archive:
        found += f", {archive['begin']} to {archive['end']} in {archive['folder']}"
    remedy = (
        "give the gateway the archive's directory as PENSTOCK_ARCHIVE, whole; `penstock-placer "
        "verify-archive` reads it all"
    )
    return (
        Finding("ledger", f"{found}; {ledger['problem']}", remedy)
        if ledger["problem"]
        else Finding("ledger", found)
    )


def _addresses(nodes: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Nodes that announce a loopback address beside others that do not:
    tasks of a gang over both cannot connect."""
    there = [node for node in nodes if node["status"] != "gone"]
    local = [node["node_id"] for node in there if _is_loopback(node["address"])]
    if local and len(local) < len(there):
        remedy = (
            "other nodes cannot reach them: give each --address (PENSTOCK_NODE_ADDRESS), or the log's "
            "URL as the others have it"
        )
        yield Finding("addresses", f"loopback announced by {_named(local)}", remedy)


def _outputs(client: Client, ready: Sequence[str], reach: Reach | None) -> Iterator[Finding]:
    """Whether the gateway can fetch what tasks wrote: it has the secret of each node, and `reach` finds each
    log server."""
    servers: list[tuple[str, str]] = []
    for node_id in ready[:MAX_ASKED]:
        logs = client.get(f"/v1/nodes/{quote(node_id, safe='')}").get("logs") or {}
        if logs.get("url"):
            servers.append((node_id, logs["url"]))
        elif logs:
            problem, _, remedy = logs["problem"].partition("; ")
            yield Finding(f"output of {node_id}", problem, remedy or SECRET)
    if reach is not None and servers:
        yield from reach(servers)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (
        f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    )


def _isolation(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    """The isolation of tasks that nodes enforce, one line per kind of node."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        kinds.setdefault(isolation(node), []).append(node)
    for what, alike in sorted(kinds.items()):
        names = _named([node["node_id"] for node in alike])
        remedy = ""
        if not alike[0].get("shares_gpus", True):
            why = alike[0]["isolation"]["reason"]
            remedy = (
                "GPUs are not shared there: let the node-reporter make PID namespaces, or give it a "
                f"cgroup ({why})"
            )
        yield Finding("isolation", f"{names}: {what}", remedy)


def _services(status: dict[str, Any]) -> Iterator[Finding]:
    """State of the other services: the deciding placer, the lag of the read models, dead letters."""
    term, profile = status["term"], status["profile"]
    if term:
        yield Finding("placer", f"term {term}, profile {profile}, {status['seq']} records")
    else:
        yield Finding("placer", "has never decided", "start the placer and look at its log")
    if (stands := status.get("undecodable")) is not None:
        found = (
            f"offset {stands['offset']} (seq {stands['seq']}) cannot be read: {stands['type']}: "
            f"{stands['cause']}"
        )
        yield Finding("ledger", found, f"all services of the cell wait there: {stands['remedy']}")
    if status["frozen"]:
        remedy = "look at the nodes that vanished; placing resumes when they return"
        yield Finding("frozen", status["frozen"], remedy)
    if (alarm := status["alarm"]) is not None:
        yield Finding("progress", f"{alarm['job_id'] or 'the cell'}: {alarm['cause']}", alarm["remedy"])
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
    """The ledger's time against the log's clock at the latest record: the ledger's time does not follow a
    clock's steps."""
    if status["log_ms"] is None:
        return
    ahead_ms = status["now_ms"] - status["log_ms"]
    if abs(ahead_ms) <= MAX_CLOCK_STEP_MS:
        yield Finding("clock", "the ledger's time is the log's")
        return
    way = "ahead of" if ahead_ms > 0 else "behind"
    yield Finding(
        "clock",
        f"the ledger's time is {duration(abs(ahead_ms))} {way} the log's clock; deadlines go by the time "
        "since boot",
        "a clock was or is wrong: look at the placer's log, and set the clocks of its machine and of the "
        "log's (NTP)",
    )
