"""Build cache of real parts (Kafka, Kubernetes): built once per machine from the files pinned in `infra/`.

Search order: an override variable; the cache, `${PENSTOCK_CACHE:-~/.cache/penstock}/<part>/<version>`; a
build into the cache. A build runs under a file lock in a folder of its own, which is renamed as a whole, so
that no process ever sees half a part. The last piece of `<version>` is a digest of the pinned files: a
changed pin is another version.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.devservers.processes import LaunchError

REPOSITORY = Path(__file__).resolve().parents[2]
INFRA = REPOSITORY / "infra"
DIGEST_DIGITS = 8


@dataclass(frozen=True)
class Part:
    """What to build, from which pinned files, and which variable replaces the build."""

    name: str
    version: str
    pins: tuple[Path, ...]
    """The files that decide what is built."""
    needs: tuple[tuple[str, str], ...]
    """Programs of the build, each with the remedy when it is missing."""
    expected: str
    """How long a build takes, as text."""
    override: str
    """Environment variable that names a ready-made part."""
    build: Callable[[Path], None]
    """Fills the given empty folder; raises `LaunchError`."""

    @property
    def key(self) -> str:
        digest = hashlib.sha256()
        for pin in self.pins:
            digest.update(pin.read_bytes())
        return f"{self.version}-{digest.hexdigest()[:DIGEST_DIGITS]}"


def cache_root() -> Path:
    """`PENSTOCK_CACHE`, else `~/.cache/penstock`."""
    named = os.environ.get("PENSTOCK_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "penstock"


def require(program: str, remedy: str) -> str:
    """Full path of a program. Raises `LaunchError` naming the remedy when it is missing."""
    found = shutil.which(program)
    if found is None:
        raise LaunchError(f"{program} is missing. {remedy}")
    return found


def obtain(part: Part) -> Path:
    """The folder of the part (or, by override, the path in the variable), built first if need be.

    Raises `LaunchError` when the override's path does not exist, a program is missing, or the build fails.
    """
    override = os.environ.get(part.override)
    if override:
        if not Path(override).exists():
            raise LaunchError(f"{part.override}={override} names nothing; correct it or unset it")
        return Path(override)
    target = cache_root() / part.name / part.key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        _lock(lock.fileno(), part)
        if not target.is_dir():  # the process that held the lock before may have built it
            _build(part, target)
    return target


def _lock(descriptor: int, part: Part) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _report(f"waiting for another process that builds {part.name} {part.version}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _build(part: Part, target: Path) -> None:
    for program, remedy in part.needs:
        require(program, f"{remedy}; or set {part.override} to a ready-made one")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed build; this process holds the lock
    unfinished.mkdir()
    _report(f"building {part.name} {part.version} once, {part.expected}; cached in {target}")
    started = time.monotonic()
    try:
        part.build(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _report(f"built {part.name} {part.version} in {time.monotonic() - started:.0f} s")


def build_environment(**settings: str) -> dict[str, str]:
    """The caller's environment with these settings on top."""
    return {**os.environ, **settings}


def copy_files(sources: Sequence[Path], folder: Path) -> None:
    """Copies files by name into a folder, so that a build tool cannot write beside the pinned ones."""
    for source in sources:
        shutil.copyfile(source, folder / source.name)


def _report(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
