"""Activation of a task's Python virtual environment or conda environment, and the look-up of its program.

Standard library only: a task's leader runs it as the task's user, who may see other folders than the reporter
does.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

CONDA_ROOTS = (
    "miniforge3",
    "mambaforge",
    "miniconda3",
    "anaconda3",
    "micromamba",
    ".local/share/mamba",
    ".conda",
)
"""Below the user's home and /opt;
a conda environment NAME lies in ROOT/envs/NAME, `base` is the root itself."""
CONDA_FOLDERS = ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS")
"""Conda's own variables: folders of environments. The node-reporter's values count."""
BASE = "base"
ACTIVATE = ("bash", "-c", 'for script; do . "$script" >&2; done; exec /usr/bin/env -0', "activate")
"""Sources the scripts that follow, and prints the variables."""
OF_THE_SHELL = frozenset(("_", "SHLVL", "OLDPWD", "PWD"))
MAX_FIRST_LINE = 256  # bytes; the kernel's bound of a first line `#!`


def enter(kind: str, where: str, env: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """The variables with those of an environment. `kind`: venv or conda. `folders`: of conda environments,
    before the usual ones.

    Raises `OSError` where there is no such environment.
    """
    if kind == "venv":
        os.stat(f"{where}/bin/python")
        return {**_first(where, env), "VIRTUAL_ENV": where}
    prefix = where if where.startswith("/") else _named(where, env.get("HOME", "/"), folders)
    os.stat(f"{prefix}/conda-meta")
    named = {"CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": where, "CONDA_SHLVL": "1"}
    return _activated(prefix, {**_first(prefix, env), **_state(prefix), **named})


def _state(prefix: str) -> dict[str, str]:
    """Variables of `conda env config vars set`."""
    try:
        with open(f"{prefix}/conda-meta/state") as file:
            found = json.load(file)["env_vars"]
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _activated(prefix: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables after the environment's own scripts for its activation, as `conda activate` runs them;
    what they print is the task's output.

    Packages such as compilers, MKL and CUDA set their variables there. Where a script ends the shell, the
    variables are as before.
    """
    folder = f"{prefix}/etc/conda/activate.d"
    try:
        scripts = sorted(f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".sh"))
    except OSError:
        return dict(env)
    if not scripts:
        return dict(env)
    import subprocess  # few tasks need it, and each leader would load it

    done = subprocess.run(
        [*ACTIVATE, *scripts],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=1,
        check=False,
    )
    if done.returncode != 0:
        os.write(
            1,
            f"conda's scripts in {folder} ended with code {done.returncode}: none is in effect\n".encode(),
        )
        return dict(env)
    pairs = (entry.partition("=") for entry in done.stdout.decode(errors="surrogateescape").split("\0"))
    return {name: value for name, mark, value in pairs if mark and name not in OF_THE_SHELL}


def find_program(request: Mapping[str, Any]) -> str | None:
    """Path of a request's program by PATH, looked up while its leader waits: a look-up costs less than an
    attempt to execute.

    None: `execute` has to search, as where a folder of PATH depends on the task's working folder, or on what
    is created there.
    """
    name, path = request["argv"][0], request["env"].get("PATH", os.defpath).split(":")
    settled = request["code"] is None and request["programs"] is None
    if not settled or "/" in name or not all(folder.startswith("/") for folder in path):
        return None
    places = (f"{folder}/{name}" for folder in path)
    return next((place for place in places if os.access(place, os.X_OK) and os.path.isfile(place)), None)


def execute(found: str | None, argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """`found`: by `find_program`; if it fails, all of PATH is tried. Raises `OSError`.

    A script whose first line ends with CRLF is not tried: `env` would be found, and fail with half a message.
    """
    if "/" in argv[0] and cause_of(argv[0], env) == "crlf":
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC), argv[0])
    if found is not None:
        with suppress(OSError):
            os.execve(found, argv, env)
    os.execvpe(argv[0], argv, env)


def cause_of(name: str, env: Mapping[str, str]) -> str:
    """Why a program cannot be executed, as far as its file shows: `crlf`, `interpreter`, `first_line`, `mode`
    or `folder`; empty: not known.

    `interpreter`: its first line names one that is not there; `first_line`: a text without `#!`; `mode`: not
    executable; `folder`: it is in the working folder, which is not on PATH. Never raises.
    """
    places = [name] if "/" in name else [f"{one}/{name}" for one in env.get("PATH", os.defpath).split(":")]
    place = next((place for place in places if os.path.isfile(place)), None)
    if place is None:
        return "folder" if "/" not in name and os.path.isfile(name) else ""
    try:
        with open(place, "rb") as file:
            first = file.readline(MAX_FIRST_LINE)
    except OSError:
        return ""
    if first.startswith(b"#!") and first.endswith(b"\r\n"):
        return "crlf"
    if not os.access(place, os.X_OK):
        return "mode"
    if first.startswith(b"#!"):
        words = first[2:].split()
        return "interpreter" if words and not os.path.exists(words[0]) else ""
    return "first_line" if b"\0" not in first and not first.startswith(b"\x7fELF") else ""


def conda_folders(env: Mapping[str, str]) -> list[str]:
    """Folders named in the reporter's own environment."""
    return [folder for name in CONDA_FOLDERS for folder in env.get(name, "").split(":") if folder]


def _first(prefix: str, env: Mapping[str, str]) -> dict[str, str]:
    """With its programs first, and without variables of another environment."""
    others = {"VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONHOME"}
    path = f"{prefix}/bin:{env.get('PATH', os.defpath)}"
    return {name: text for name, text in env.items() if name not in others} | {"PATH": path}


def _named(name: str, home: str, folders: Sequence[str]) -> str:
    """Raises `FileNotFoundError`."""
    for prefix in _prefixes(name, home, folders):
        if os.path.isdir(f"{prefix}/conda-meta"):
            return prefix
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _prefixes(name: str, home: str, folders: Sequence[str]) -> Iterator[str]:
    roots = [f"{place}/{root}" for place in (home, "/opt") for root in CONDA_ROOTS] + ["/opt/conda"]
    if name == BASE:
        yield from roots
        return
    yield from (f"{folder}/{name}" for folder in folders)
    yield from (f"{root}/envs/{name}" for root in roots)
    try:
        with open(f"{home}/.conda/environments.txt") as file:  # conda's list of environments in other places
            yield from (line.strip() for line in file if os.path.basename(line.strip()) == name)
    except (OSError, UnicodeDecodeError):
        return


def own_environment(env: Mapping[str, str]) -> list[str]:
    """However they are spelt there: the folder of the reporter's own virtual or conda environment, and that
    of its programs."""
    if sys.prefix == sys.base_prefix and not os.path.isdir(f"{sys.prefix}/conda-meta"):
        return []
    ours = {os.path.realpath(sys.prefix), os.path.realpath(f"{sys.prefix}/bin")}
    named = [env.get("VIRTUAL_ENV", ""), env.get("CONDA_PREFIX", ""), *env.get("PATH", "").split(":")]
    return [folder for folder in named if folder and os.path.realpath(folder) in ours]
