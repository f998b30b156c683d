"""`penstock import`: prints another scheduler's job file as a job file of Penstock, and names each key that has no equivalent."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import jobspec
from penstock.cli.output import remark
from penstock.cli.submit import submit_fields
from penstock.exits import Exit, Stop
from penstock.imports import slurm
from penstock.imports.foreign import CONVERTIBLE, NotConvertible, convert, job_file
from penstock.imports.keys import Note, Notes
from penstock.imports.shell import adapted
from penstock.sdk.command_words import script_command

SEPARATOR = "---\n"  # between the jobs of a file with several


def import_file(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help=f"File of {CONVERTIBLE}; - for stdin.")],
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE|-", help="Where to write the job file; - is stdout, the default."
        ),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job at once, and follow it.")] = False,
) -> None:
    """Convert a job file of another scheduler, and name each key that has no equivalent."""
    text = jobspec.read_text(file)
    try:
        found = convert(text, "job" if file == "-" else os.path.basename(file))
    except NotConvertible as error:
        raise Stop(Exit.BAD_SPEC, f"{file}: {error}") from error
    _name(file, found.notes)
    runnable = [job for job in found.jobs if "command" in job or "script" in job]
    if not runnable:
        raise Stop(Exit.BAD_SPEC, f"{file}: {found.kind}, of which nothing can run here; see the lines above")
    if submit:
        _refuse(file, found.notes, len(runnable))
        folder = jobspec.folder_of(file)
        place = {} if {"sync", "environment"} & runnable[0].keys() else {"workdir": folder}
        fields = jobspec.located(place | runnable[0], folder)
        raise typer.Exit(submit_fields(ctx, fields, file))
    _write(out, f"# from {found.kind}\n" + SEPARATOR.join(map(job_file, runnable)))
    if len(runnable) > 1:
        remark(f"{file}: {len(runnable)} jobs, between lines ---; submit each from a file of its own")


def _name(file: str, notes: Notes) -> None:
    """Prints what has no equivalent."""
    for note in notes:
        remark(f"{file}: {note}")


def _refuse(file: str, notes: Sequence[Note], jobs: int) -> None:
    """Raises `Stop` for what cannot be submitted without a look."""
    if jobs > 1:
        raise Stop(Exit.BAD_SPEC, f"{file}: holds {jobs} jobs; write them with -o, and submit each")
    needed = [note.path for note in notes if note.needed]
    if needed:
        text = f"not submitted, since it would do something else without {', '.join(needed)}"
        text += f"; `penstock import {file} -o job.yaml` writes what there is to mend"
        raise Stop(Exit.BAD_SPEC, f"{file}: {text}")


def _write(out: str | None, text: str) -> None:
    if out in (None, "-"):
        sys.stdout.write(text)
        return
    try:
        Path(str(out)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Stop(Exit.BAD_SPEC, f"-o {out}: cannot be written: {error.strerror}") from error


def script_fields(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any] | None:
    """Fields of a command whose program is a script with `#SBATCH` lines, the script itself included, as `sbatch` stores it; None: it is none.

    `flags`: names of variables and options that the submission gives by itself. Raises `Stop` for options without which it would do
    something else.
    """
    path = Path(command[0])
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if _is_small_file(path) else ""
    except OSError:
        return None
    if not slurm.is_script(text):
        return None
    notes: Notes = []
    fields = slurm.fields_of(text, path.name.rsplit(".", 1)[0], notes, flags)
    try:
        fields["command"] = script_command(adapted(text, "script", notes), path.name, command[1:])
    except ValueError as error:
        raise Stop(Exit.BAD_SPEC, f"{path}: {error}") from error
    _name(str(path), notes)
    _refuse(str(path), notes, 1)
    return fields


def _is_small_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= jobspec.MAX_FILE_BYTES
