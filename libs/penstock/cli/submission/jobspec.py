"""Builds the job to submit from a job file and flags."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.exits import Exit, Stop
from penstock.imports.foreign import kind_of
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.process_rules import leads_out
from penstock.sdk.code_archive import NotPackable, Packed, pack
from penstock.sdk.job_file.job_yaml import JobLoader, problem_of
from penstock.sdk.job_file.jobfile import PACKED, PATH, BadJob, parse_job
from penstock.sdk.reporter.own_folder import is_a_tasks_own, submitted_here
from penstock.text.redaction import brief, unquoted

FILE_PREFIXES = ("/", "./", "../", "~/")  # of an image that is a file
MAX_FILE_BYTES = 1 << 20  # far above any job; keeps a mistyped path to a data set from being read whole


def read_job_file(path: str, *, packed: bool = False) -> dict[str, Any]:
    """The mapping in a YAML job file; `-` reads stdin. Raises `Stop` with line and column.

    Relative paths in it are relative to its folder, which is also the default of `workdir`, unless a folder
    is packed: by its `sync`, or by a flag (`packed`).
    """
    text = read_text(path)
    if (kind := kind_of(text)) is not None:
        raise Stop(Exit.BAD_SPEC, f"{path}: is {kind}, not a job file: `penstock import {path}` converts it")
    try:
        found = yaml.load(text, JobLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise Stop(Exit.BAD_SPEC, f"{path}{where}: is not valid YAML: {problem_of(error)}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise Stop(Exit.BAD_SPEC, f"{path}: is not valid YAML: {unquoted(str(error))}") from error
    if not isinstance(found, dict):
        raise Stop(Exit.BAD_SPEC, f"{path}: holds no job; write fields such as `command: [python, train.py]`")
    folder = folder_of(path)
    sent = packed or found.get("sync") is not None
    if found.get("workdir") is None and not sent and not is_a_tasks_own(folder):
        found["workdir"] = folder
    return located(found, folder)


def read_text(path: str) -> str:
    """The text of a job file; `-` reads stdin. Raises `Stop`."""
    try:
        if path == "-":
            text = sys.stdin.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Stop(Exit.BAD_SPEC, f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Stop(Exit.BAD_SPEC, f"{path}: is not UTF-8 text; a job file is YAML") from error
    if len(text) > MAX_FILE_BYTES:
        raise Stop(
            Exit.BAD_SPEC,
            f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB; a job file is a dozen lines of YAML",
        )
    return text


def folder_of(path: str) -> str:
    """The folder that a job file's relative paths start from."""
    return os.getcwd() if path == "-" else os.path.dirname(os.path.abspath(path))


def located(fields: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The fields with absolute paths in place of those relative to this folder, `~` included."""
    found = dict(fields)
    if isinstance(workdir := found.get("workdir"), str):
        found["workdir"] = _absolute(workdir, folder)
    if isinstance(sync := found.get("sync"), str) and not sync.startswith(PACKED):
        found["sync"] = _absolute(sync, folder)
    environment = found.get("environment")
    if isinstance(environment, dict):
        found["environment"] = {
            kind: _absolute(text, folder) if _is_path(kind, text) else text
            for kind, text in environment.items()
        }
    return found


def _is_path(kind: str, text: object) -> bool:
    """Whether an environment's field is a folder or an image's file, not the name of a conda environment or
    of an image in a registry."""
    if not isinstance(text, str):
        return False
    return (
        kind == "venv"
        or (kind == "conda" and "/" in text)
        or (kind == "container" and text.startswith(FILE_PREFIXES))
    )


def synced(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Packed | None]:
    """The fields with the digest of the folder to pack and `workdir` inside it, and the folder's archive;
    None: no folder. Raises `Stop`."""
    folder, workdir = fields.get("sync"), fields.get("workdir")
    if not isinstance(folder, str) or folder.startswith(PACKED):
        return dict(fields), None
    try:
        packed = pack(Path(folder))
    except NotPackable as error:
        raise Stop(Exit.BAD_SPEC, f"sync: {error}") from error
    inside = None if not isinstance(workdir, str) else os.path.relpath(workdir, folder)
    if inside is not None and leads_out(inside):
        text = (
            f"workdir: {workdir} is not in {folder}, which is packed; name a folder in it, or leave "
            "workdir out"
        )
        raise Stop(Exit.BAD_SPEC, text)
    more = {"sync": f"{PACKED}{packed.sha256}", "workdir": None if inside == "." else inside}
    return {**fields, **more}, packed


def _absolute(path: str, folder: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path))) if path else path


def environment(found: Mapping[str, str], *, path: bool) -> dict[str, str] | str | None:
    """`environment` of a job file, from flags; None: no flag is given. Raises `Stop`."""
    if len(found) + path > 1:
        flags = [*(f"--{kind}" for kind in found), *(["--path"] if path else [])]
        raise Stop(Exit.BAD_SPEC, f"{' and '.join(flags)}: programs come from one place; give one of them")
    return PATH if path else dict(found) or None


def workers(fields: Mapping[str, Any], fewest: int | None, most: int | None) -> int | dict[str, Any] | None:
    """`workers` in the job file's form: with --min-workers a range, whose other end may be in the file."""
    if fewest is None:
        return most
    written = fields.get("workers")
    ends = {"max": written.get("max")} if isinstance(written, Mapping) else {"max": written}
    return {**({} if ends["max"] is None else ends), "min": fewest, **({} if most is None else {"max": most})}


def build(fields: Mapping[str, Any], where: str) -> JobSpec:
    """The job these fields describe; owner and workdir default to this user and folder. Raises `Stop`."""
    try:
        return parse_job(submitted_here(fields))
    except BadJob as error:
        lines = [f"{where}: {problem}" for problem in error.problems]
        raise Stop(Exit.BAD_SPEC, "\n".join(lines)) from error


def pairs(values: list[str], flag: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """`NAME=VALUE` flags as a mapping. Raises `Stop`."""
    found: dict[str, str] = {}
    for text in values:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise Stop(Exit.BAD_SPEC, f"{flag} {brief(text)}: give {form}")
        if name in found:
            raise Stop(Exit.BAD_SPEC, f"{flag} {name} is given twice; leave one out")
        found[name] = value
    return found


def variables(env: list[str], secrets: list[str]) -> dict[str, Any]:
    """`env` of a job file, from `--env` and `--secret`. Raises `Stop`."""
    named = pairs(secrets, "--secret", "VARIABLE=NAME, the name of a secret that the nodes have")
    plain = pairs(env, "--env")
    if twice := sorted(plain.keys() & named.keys()):
        raise Stop(
            Exit.BAD_SPEC,
            f"--env {twice[0]} and --secret {twice[0]}: one variable has one source; remove one",
        )
    return {**plain, **{name: {"secret": secret} for name, secret in named.items()}}


def default_name(command: list[str] | str) -> str:
    """A job's name from its command: the script, else the program, without folder and ending; of a script's
    text likewise."""
    words = command.split() if isinstance(command, str) else command
    script = next(
        (word for word in words if word.endswith((".py", ".sh"))), "" if words is not command else words[0]
    )
    stem = Path(script).name.rsplit(".", 1)[0]
    name = "".join(
        letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in stem
    )
    return name.strip("._-")[:64] or "job"
