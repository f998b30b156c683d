"""Copy of the files that lie beside log and database: keys, tokens, certificates, and the code of jobs.

The environment names each of them, when it is copied and when it is put back.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.backup.manifest import CopiedFile, digest_of
from penstock.errors import ConfigurationError
from penstock.runtime.keys.log_keys import VARIABLE as NODE_LOG_KEY
from penstock.runtime.keys.node_keys import OPERATOR_KEY, TRUST_LOG

CODE = "PENSTOCK_CODE_DIR"
VARIABLES = (
    OPERATOR_KEY,
    NODE_LOG_KEY,
    "PENSTOCK_TOKENS",
    "PENSTOCK_GATEWAY_TLS_CERT",
    "PENSTOCK_GATEWAY_TLS_KEY",
    CODE,
)
PERMISSIONS = 0o777


def copy_out(copy: Path, env: Mapping[str, str]) -> list[CopiedFile]:
    """Copies what these variables name. Raises `ConfigurationError` for a path that cannot be read."""
    found = []
    for variable in VARIABLES:
        named = env.get(variable)
        if not named or named == TRUST_LOG:
            continue
        try:
            for path in _files_in(Path(named)):
                inside = str(path.relative_to(named)) if path != Path(named) else ""
                mode = path.stat().st_mode & PERMISSIONS
                target = copy / CopiedFile(variable, inside, mode, "").file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                target.chmod(0o600)
                found.append(CopiedFile(variable, inside, mode, digest_of(target)))
        except OSError as error:
            raise ConfigurationError(
                f"{variable}: {error.filename} cannot be copied: {error.strerror}; run the command as a user "
                "who may read it"
            ) from error
    return found


def _files_in(path: Path) -> Iterator[Path]:
    """The file itself, or every regular file in the folder, in order of their names."""
    if not path.is_dir():
        yield path
    else:
        yield from sorted(found for found in path.rglob("*") if found.is_file() and not found.is_symlink())


def check_free(files: Sequence[CopiedFile], env: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` for a copied file that exists with another content, or would lie outside
    its folder."""
    for file in files:
        target = _target(file, env)
        if target is not None and target.exists() and digest_of(target) != file.sha256:
            raise ConfigurationError(
                f"{file.variable}: {target} exists, and differs from the copy; move it away, or give another "
                "path. Nothing was changed"
            )


def copy_back(copy: Path, files: Sequence[CopiedFile], env: Mapping[str, str]) -> list[str]:
    """Writes the files where the environment has their variables, after `check_free`; returns the variables
    that it does not have."""
    left = set()
    for file in files:
        target = _target(file, env)
        if target is None:
            left.add(file.variable)
        elif not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = target.with_name(target.name + ".part")
            part.touch(mode=0o600)
            shutil.copyfile(copy / file.file, part)
            part.chmod(file.mode)
            os.replace(part, target)
    return sorted(left)


def _target(file: CopiedFile, env: Mapping[str, str]) -> Path | None:
    named = env.get(file.variable)
    if not named or named == TRUST_LOG:
        return None
    inside = Path(file.path)
    if file.variable not in VARIABLES or inside.is_absolute() or ".." in inside.parts:
        raise ConfigurationError(f"{file.file} of the copy has no place here: use another copy")
    return Path(named) / inside if file.path else Path(named)
