"""Scripts with `#SBATCH` lines as the program of `penstock submit`,
and what is printed of keys without an equivalent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.output import remark
from penstock.cli.submission import jobspec
from penstock.exits import Exit, Stop
from penstock.imports import slurm
from penstock.imports.keys import Note, Notes
from penstock.imports.shell import adapted
from penstock.sdk.job_file.command_words import script_command


def name_notes(file: str, notes: Notes) -> None:
    """Prints what has no equivalent."""
    for note in notes:
        remark(f"{file}: {note}")


def refuse_needed(file: str, notes: Sequence[Note], jobs: int) -> None:
    """Raises `Stop` for what cannot be submitted without a look."""
    if jobs > 1:
        raise Stop(Exit.BAD_SPEC, f"{file}: holds {jobs} jobs; write them with -o, and submit each")
    needed = [note.path for note in notes if note.needed]
    if needed:
        text = f"not submitted, since it would do something else without {', '.join(needed)}"
        text += f"; `penstock import {file} -o job.yaml` writes what there is to mend"
        raise Stop(Exit.BAD_SPEC, f"{file}: {text}")


def script_fields(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any] | None:
    """Fields of a command whose program is a script with `#SBATCH` lines, the script itself included, as
    `sbatch` stores it; None: it is none.

    `flags`: names of variables and options that the submission gives by itself. Raises `Stop` for options
    without which it would do something else.
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
    name_notes(str(path), notes)
    refuse_needed(str(path), notes, 1)
    return fields


def _is_small_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= jobspec.MAX_FILE_BYTES
