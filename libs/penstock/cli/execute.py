"""`penstock exec`: runs a command in a running task, and prints its output as it comes."""

import json
import sys
from base64 import b64decode
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.common import JobArgument, Output, find_job_id, gateway
from penstock.cli.output import Format, dump
from penstock.client import Client
from penstock.exits import Exit, Stop


def execute(
    ctx: typer.Context,
    job: JobArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Program and arguments.")],
    task: Annotated[str | None, typer.Option(metavar="w0", help="Task; needed where several run.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Run a command in a running job's task, with its environment; exits with the command's code.

    The command has the environment, working folder, user, cores and GPUs of the task's program, and no input.
    It ends with the task, or with Ctrl-C here. `penstock events` shows who ran what. Exit code: that of the
    command; 128 + N if signal N ended it; 126 or 127 if it could not be run.
    """
    client = gateway(ctx)
    asked = {"command": command} | ({} if task is None else {"task": task})
    shows = output not in (Format.JSON, Format.YAML)
    parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    for frame in _frames(client, find_job_id(client, job), asked):
        if "problem" in frame:
            raise Stop(Exit.PROBLEM, str(frame["problem"]))
        if "exit_code" in frame:
            if not shows:
                texts = {name: b"".join(found).decode(errors="replace") for name, found in parts.items()}
                dump(frame | texts, output)
            raise typer.Exit(frame["exit_code"])
        for name, text in frame.items():
            if shows:
                stream = getattr(sys, name).buffer
                stream.write(b64decode(text))
                stream.flush()
            else:
                parts[name].append(b64decode(text))
    raise Stop(
        Exit.UNREACHABLE, "the gateway ended the answer before the command; `penstock events` has its end"
    )


def _frames(client: Client, job_id: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Raises `Stop`."""
    rest = ""
    with client.lines(f"/v1/jobs/{job_id}/exec", asked) as chunks:
        for chunk in chunks:
            *whole, rest = (rest + chunk).split("\n")
            yield from map(json.loads, whole)
