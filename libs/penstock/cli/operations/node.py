"""Operators' commands on nodes: cordon, drain, uncordon, fence.
The operator and the reason are stored with each."""

import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.text import Text

from penstock.cli.common import NodeArgument, Output, gateway
from penstock.cli.output import Format, present
from penstock.client import Client
from penstock.exits import Exit, Stop

MAX_NAMED = 10  # jobs in a question

Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Stored with the command; `why` shows it.")
]


def cordon(
    ctx: typer.Context, node: NodeArgument, reason: Reason = "", output: Output = Format.TABLE
) -> None:
    """Place no further tasks on a node; its running tasks continue."""
    _order(gateway(ctx), "cordon", node, reason, output)


def drain(ctx: typer.Context, node: NodeArgument, reason: Reason = "", output: Output = Format.TABLE) -> None:
    """Cordon a node, stop its jobs with their grace and place them elsewhere."""
    _order(gateway(ctx), "drain", node, reason, output)


def uncordon(
    ctx: typer.Context, node: NodeArgument, reason: Reason = "", output: Output = Format.TABLE
) -> None:
    """Use a node again: end a cordon, a drain with it, and the suspicion after jobs failed there."""
    _order(gateway(ctx), "uncordon", node, reason, output)


def fence(
    ctx: typer.Context,
    node: NodeArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    reason: Reason = "",
    output: Output = Format.TABLE,
) -> None:
    """Declare a machine dead for certain: its jobs are placed elsewhere at once.

    If the machine is alive after all, its tasks run twice until its node-reporter is restarted, which ends
    them and joins anew.
    """
    client = gateway(ctx)
    if not yes:
        _confirm(node, client.get(f"/v1/nodes/{quote(node)}")["jobs"])
    _order(client, "fence", node, reason, output)


def _confirm(node: str, jobs: list[str]) -> None:
    """Raises `Stop` unless a person agrees."""
    named = ", ".join(jobs[:MAX_NAMED]) + (
        f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
    )
    effect = f"start anew elsewhere: {named}" if jobs else "no jobs are on it"
    question = f"Is {node} dead for sure, its power cut or the machine destroyed? On yes, {effect}"
    if not sys.stdin.isatty():
        raise Stop(Exit.BAD_SPEC, f"{question}; there is no terminal to answer on: give --yes if it is")
    if not typer.confirm(question, err=True):
        raise Stop(Exit.PROBLEM, f"node {node}: not fenced")


def _order(client: Client, act: str, node: str, reason: str, output: Format) -> None:
    found: dict[str, Any] = client.post(f"/v1/nodes/{quote(node)}/{act}", {"reason": reason})
    present(found, output, lambda: Text(_sentence(act, found)))


def _sentence(act: str, found: dict[str, Any]) -> str:
    node, jobs = found["node_id"], found["jobs"]
    if not found["applied"]:
        return (
            f"{node}: the order is in the log, and the placer has not answered yet; see `penstock get nodes`"
        )
    if act == "drain":
        if not jobs:
            return f"{node}: {found['status']}, drained; nothing runs on it"
        leaving = "1 job is" if len(jobs) == 1 else f"{len(jobs)} jobs are"
        return f"{node}: {leaving} leaving it; `penstock get nodes` shows when it is drained"
    if act == "fence":
        return (
            f"{node}: {found['status']}; if it lives after all, restart its node-reporter, which ends "
            "what it still runs"
        )
    return f"{node}: {found['status']}, {'cordoned' if found['cordon'] else 'not cordoned'}"
