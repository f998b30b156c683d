"""Secrets of a node: by name, from a folder of files (a mounted Kubernetes secret) or from the reporter's environment.

Read when a task starts and handed to its process alone: through the launcher's socket into its environment, never to a disk.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from penstock_services.node_reporter.shell.ports import SecretMissing

PREFIX = "PENSTOCK_SECRET_"
MAX_SECRET_BYTES = 16_384


class Secrets:
    """`folder`: a file per secret, not readable by other users. `env`: the reporter's; `wandb-key` is `PENSTOCK_SECRET_WANDB_KEY`."""

    def __init__(self, folder: Path | None, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = {name: text for name, text in env.items() if name.startswith(PREFIX)}

    def resolve(self, asked: Mapping[str, str]) -> dict[str, str]:
        """Variable → value. Raises `SecretMissing` with variable, name and remedy, never with a value."""
        return {variable: self._value(variable, name) for variable, name in asked.items()}

    def _value(self, variable: str, name: str) -> str:
        if self._folder is not None:
            try:
                with (self._folder / name).open("rb") as file:
                    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                    raw = file.read(MAX_SECRET_BYTES + 1)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise SecretMissing(
                    f"{variable}: secret {name!r} cannot be read on this node: {error.strerror}"
                ) from error
            else:
                return _checked(variable, name, mode, raw)
        own = PREFIX + name.upper().replace("-", "_").replace(".", "_")
        found = self._env.get(own)
        if found is None:
            raise SecretMissing(
                f"{variable}: this node has no secret {name!r}; put it into a file of that name, mode 0600, in the folder "
                f"that --secrets-dir (PENSTOCK_SECRETS_DIR) names, or into the node-reporter's {own}, on every node"
            )
        return found


def _checked(variable: str, name: str, mode: int, raw: bytes) -> str:
    """Raises `SecretMissing`."""
    what = f"{variable}: secret {name!r} cannot be used"
    if mode & 0o007:
        raise SecretMissing(
            f"{what}: every user of this node can read it (mode {mode:04o}); give its file mode 0600, or defaultMode 0400"
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
