"""Where a task's programs come from: Python virtual environments and conda environments, entered as their activation does.

Standard library only: a task's leader runs it as the task's user, who may see other folders than the reporter does.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence

CONDA_ROOTS = (
    "miniforge3",
    "mambaforge",
    "miniconda3",
    "anaconda3",
    "micromamba",
    ".local/share/mamba",
    ".conda",
)
"""Below the user's home and /opt; a conda environment NAME lies in ROOT/envs/NAME, `base` is the root itself."""
CONDA_FOLDERS = ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS")
"""Conda's own variables: folders of environments. The node-reporter's count."""
BASE = "base"


def enter(kind: str, where: str, env: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """The variables with those of an environment. `kind`: venv or conda. `folders`: of conda environments, before the usual ones.

    Raises `OSError` where there is no such environment.
    """
    if kind == "venv":
        os.stat(f"{where}/bin/python")
        return {**_first(where, env), "VIRTUAL_ENV": where}
    prefix = where if where.startswith("/") else _named(where, env.get("HOME", "/"), folders)
    os.stat(f"{prefix}/conda-meta")
    return {**_first(prefix, env), "CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": where}


def conda_folders(env: Mapping[str, str]) -> list[str]:
    """What the reporter's own environment names."""
    return [folder for name in CONDA_FOLDERS for folder in env.get(name, "").split(":") if folder]


def _first(prefix: str, env: Mapping[str, str]) -> dict[str, str]:
    """With its programs first, and nothing of another environment."""
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
        with open(f"{home}/.conda/environments.txt") as file:  # where conda lists those that lie elsewhere
            yield from (line.strip() for line in file if os.path.basename(line.strip()) == name)
    except (OSError, UnicodeDecodeError):
        return
