"""`penstock doctor`: diagnostic checks of this machine, of the services whose settings are given, and of the
cell, with remedies."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from penstock.cli.common import Output
from penstock.cli.operations.doctor import Finding, cell_findings, checked, table_of
from penstock.cli.output import Format, present
from penstock.cli.session import Session
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.local.doctor.env_file import read_env_file
from penstock.local.doctor.machine import machine_findings
from penstock.local.doctor.reach import log_server_findings

SERVER = ("PENSTOCK_SERVER", "PENSTOCK_TOKEN_FILE", "PENSTOCK_CA")
OF_NODE = ("PENSTOCK_NODE_GATEWAY", "PENSTOCK_NODE_TOKEN_FILE", "PENSTOCK_NODE_CA")


def doctor(
    ctx: typer.Context,
    env_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="File of settings of a service, as systemd's EnvironmentFile; repeatable. Default: the "
            "environment.",
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Check this machine, what its services need, and the cell; exit code 1 when something is wrong.

    Run it as the user of the service, on each machine, with each file of settings: PENSTOCK_LOG,
    PENSTOCK_DSN, PENSTOCK_GATEWAY_… and PENSTOCK_NODE_… determine what is checked.
    """
    env: Mapping[str, str] = dict(os.environ)
    for path in env_file or ():
        env = {**env, **read_env_file(path)}
    findings = list(_findings(env, cast(Session, ctx.find_root().obj), whole=bool(env_file)))
    wrong = {(found, remedy): what for what, found, remedy in reversed(findings) if remedy}
    findings = [
        each for each in findings if wrong.get(each[1:], each.what) == each.what
    ]  # the first of equal ones
    rows = [
        {"what": what, "well": not remedy, "found": found, "remedy": remedy}
        for what, found, remedy in findings
    ]
    present({"findings": rows}, output, lambda: table_of(findings))
    if any(finding.remedy for finding in findings):
        raise typer.Exit(int(Exit.PROBLEM))


def _findings(env: Mapping[str, str], session: Session, *, whole: bool) -> Iterator[Finding]:
    yield from machine_findings(env, whole=whole)
    try:
        client = _gateway(env, session)
    except Stop as stop:
        problem, _, remedy = str(stop).partition("; ")
        yield Finding("gateway", problem, remedy or "mend the options of this command")
        return
    try:
        at_gateway = any(name.startswith("PENSTOCK_GATEWAY_") and text for name, text in env.items())
        reach = partial(log_server_findings, ca=env.get("PENSTOCK_NODE_LOG_CA"))
        yield from checked("gateway", lambda: cell_findings(client, reach if at_gateway else None))
    finally:
        client.close()


def _gateway(env: Mapping[str, str], session: Session) -> Client:
    """The gateway that this command names, else that of the settings files: PENSTOCK_SERVER, or a
    node-reporter's gateway."""
    names = SERVER if env.get("PENSTOCK_SERVER") else OF_NODE
    if session.server is not None or not env.get(names[0]):
        return session.gateway()
    server, token, ca = (env.get(name) for name in names)
    return Client(server, token_file=session.token_file or token, ca=session.ca or ca, tries=1)
