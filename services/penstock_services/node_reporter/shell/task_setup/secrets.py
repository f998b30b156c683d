"""Secrets of a node: by tenant and name, from a folder of files (mounted Kubernetes secrets) or from the
reporter's environment.

A job gets its own tenant's, then those shared by all tenants: `TENANT/NAME`, then `shared/NAME`. Each is
searched as that file in the folder, then as the variable `PENSTOCK_SECRET_TENANT__NAME`. Read when a task
starts and passed to its process alone: through the launcher's socket into its environment, never to a disk.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from penstock.model.nouns.types import SHARED_TENANT
from penstock_services.node_reporter.shell.ports import SecretMissing

PREFIX = "PENSTOCK_SECRET_"
MAX_SECRET_BYTES = 16_384
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*\Z")
"""A part of a tenant's name that is a folder: not `..`, nor one of Kubernetes' own,
which begin with two dots."""
PLAIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
"""Tenants and names that have a variable: no two of them have the same, and none contains the two underscores
of the separator."""


class Secrets:
    """`folder`: a file per secret, readable by its owner alone. `env`: the reporter's."""

    def __init__(self, folder: Path | None, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = {name: text for name, text in env.items() if name.startswith(PREFIX)}

    def resolve(self, asked: Mapping[str, str], tenant: str | None) -> dict[str, str]:
        """Variable → value, for a job of this tenant; None: not known. Raises `SecretMissing` with variable,
        name and remedy, never with a value."""
        return {variable: self._value(variable, name, tenant) for variable, name in asked.items()}

    def _value(self, variable: str, name: str, tenant: str | None) -> str:
        for place in (tenant, SHARED_TENANT):
            if place is None:
                continue
            found = self._in_folder(variable, place, name)
            if found is None:
                found = self._env.get(_variable(place, name) or "")
            if found is not None:
                return found
        raise SecretMissing(f"{variable}: {self._missing(name, tenant)}")

    def _in_folder(self, variable: str, place: str, name: str) -> str | None:
        """Raises `SecretMissing` for one that cannot be used."""
        if self._folder is None or not all(FOLDER.match(part) for part in place.split("/")):
            return None
        try:
            with (self._folder / place / name).open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                raw = file.read(MAX_SECRET_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SecretMissing(
                f"{variable}: secret {name!r} cannot be read on this node: {error.strerror}"
            ) from error
        return _checked(variable, name, mode, raw)

    def _missing(self, name: str, tenant: str | None) -> str:
        """The missing secret, and the remedy."""
        files = [f"{place}/{name}" for place in (tenant, SHARED_TENANT) if place]
        variables = [
            found for place in (tenant, SHARED_TENANT) if place and (found := _variable(place, name))
        ]
        flat = self._folder is not None and (self._folder / name).is_file()
        if flat or f"{PREFIX}{_upper(name)}" in self._env:
            given = files if flat else variables or files
            return (
                f"secret {name!r} on this node belongs to no tenant; rename it to {given[0]}, or to "
                f"{given[-1]} for all tenants, "
                "on every node"
            )
        return (
            f"this node has no secret {name!r} for {tenant or 'every tenant'}; put it into the file "
            f"{files[0]}, mode 0600, in the "
            f"folder that --secrets-dir names, on every node; {files[-1]} is for all tenants"
        )


def _variable(place: str, name: str) -> str | None:
    """Its variable; None where two secrets could have the same, which are possible as files only."""
    if PLAIN.match(place) is None or PLAIN.match(name) is None:
        return None
    return f"{PREFIX}{_upper(place)}__{_upper(name)}"


def _upper(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "_")


def _checked(variable: str, name: str, mode: int, raw: bytes) -> str:
    """Raises `SecretMissing`."""
    what = f"{variable}: secret {name!r} cannot be used"
    if mode & 0o007:
        raise SecretMissing(
            f"{what}: every user of this node can read it (mode {mode:04o}); give its file mode 0600, or "
            "defaultMode 0400"
        )
    if len(raw) > MAX_SECRET_BYTES:
        raise SecretMissing(f"{what}: it exceeds {MAX_SECRET_BYTES} bytes; have the program read a file")
    try:
        text = raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SecretMissing(f"{what}: it is not UTF-8 text; have the program read a file") from error
    if "\0" in text:
        raise SecretMissing(f"{what}: a NUL character cannot be passed to a process; remove it")
    return text
