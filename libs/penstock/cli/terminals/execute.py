"""`penstock exec`: runs a command in a running task, and prints its output as it comes; with input and a
terminal if asked for."""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Annotated, Any, cast

import typer

from penstock.cli.common import JobArgument, Output, find_job_id, gateway
from penstock.cli.output import Format, dump
from penstock.cli.session import Session
from penstock.cli.signals import exit_code
from penstock.cli.terminals import terminal
from penstock.client import Client
from penstock.exits import Exit, Stop


def execute(
    ctx: typer.Context,
    job: JobArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Program and arguments.")],
    task: Annotated[str | None, typer.Option(metavar="w0", help="Task; needed where several run.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass this command's input on to it.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal: -it for a shell.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Run a command in a running job's task, with its environment; exits with the command's code.

    The command has the environment, working folder, user, cores and GPUs of the task's program, and no input
    without -i. With -it it has this terminal: its size, and all keys, Ctrl-C as well. It ends with the task,
    or with this command: then it gets SIGHUP, and is killed 2 s later. `penstock events` shows who ran what.
    Exit code: that of the command; 128 + N if signal N ended it; 126 or 127 if it could not be run.
    """
    shows = output not in (Format.JSON, Format.YAML)
    if tty:
        terminal.require_terminal("--tty", "leave it out, or give -i alone for a pipe")
    if tty and not shows:
        raise Stop(Exit.BAD_SPEC, f"--tty: a terminal's output is not {output}; leave out -t or -o")
    asked: dict[str, Any] = {"command": command} | ({} if task is None else {"task": task})
    parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

    def write(name: str, data: bytes) -> None:
        if shows:
            terminal.show(name, data)
        else:
            parts[name].append(data)

    client = gateway(ctx)
    path = f"/v1/jobs/{find_job_id(client, job)}/exec"
    if stdin or tty:
        asked |= {"stdin": stdin} | ({"terminal": terminal.size(), "term": terminal.kind()} if tty else {})
        found = cast(Session, ctx.find_root().obj).session(path, asked)
        try:
            end = terminal.join(found, write, stdin=stdin, terminal=tty)
        except KeyboardInterrupt as stop:
            raise typer.Exit(exit_code(stop)) from stop
    else:
        end = _output(client, path, asked, write)
    if not shows:
        dump(end | {name: b"".join(found).decode(errors="replace") for name, found in parts.items()}, output)
    raise typer.Exit(end["exit_code"])


def _output(client: Client, path: str, asked: dict[str, Any], write: terminal.Write) -> dict[str, Any]:
    """Of a command without input; its last frame. Raises `Stop`."""
    for frame in _frames(client, path, asked):
        if "problem" in frame:
            raise Stop(Exit.PROBLEM, str(frame["problem"]))
        if "exit_code" in frame:
            return frame
        for name, text in frame.items():
            write(name, b64decode(text))
    raise Stop(
        Exit.UNREACHABLE, "the gateway ended the answer before the command; `penstock events` has its end"
    )


def _frames(client: Client, path: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Raises `Stop`."""
    rest = ""
    with client.lines(path, asked) as chunks:
        for chunk in chunks:
            *whole, rest = (rest + chunk).split("\n")
            yield from map(json.loads, whole)
