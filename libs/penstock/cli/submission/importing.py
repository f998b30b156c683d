"""`penstock import`: prints another scheduler's job file as a job file of Penstock, and names each key that
has no equivalent."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import remark
from penstock.cli.submission import jobspec
from penstock.cli.submission.sbatch import name_notes, refuse_needed
from penstock.cli.submission.submit import submit_fields
from penstock.exits import Exit, Stop
from penstock.imports.foreign import CONVERTIBLE, NotConvertible, convert, job_file

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
    name_notes(file, found.notes)
    runnable = [job for job in found.jobs if "command" in job or "script" in job]
    if not runnable:
        raise Stop(Exit.BAD_SPEC, f"{file}: {found.kind}, nothing in it can run here; see the lines above")
    if submit:
        refuse_needed(file, found.notes, len(runnable))
        folder = jobspec.folder_of(file)
        place = {} if {"sync", "environment"} & runnable[0].keys() else {"workdir": folder}
        fields = jobspec.located(place | runnable[0], folder)
        raise typer.Exit(submit_fields(ctx, fields, file))
    _write(out, f"# from {found.kind}\n" + SEPARATOR.join(map(job_file, runnable)))
    if len(runnable) > 1:
        remark(f"{file}: {len(runnable)} jobs, between lines ---; submit each from a file of its own")


def _write(out: str | None, text: str) -> None:
    if out in (None, "-"):
        sys.stdout.write(text)
        return
    try:
        Path(str(out)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Stop(Exit.BAD_SPEC, f"-o {out}: cannot be written: {error.strerror}") from error
