"""Parser of systemd's `EnvironmentFile=` format: NAME=value lines, comments, values in quotes."""

import re
import shlex
from pathlib import Path

from penstock.errors import ConfigurationError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_env_file(path: Path) -> dict[str, str]:
    """Raises `ConfigurationError` with the line's number, never with its text, which may be a password."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"--env-file {path}: cannot be read: {why}; give a file of NAME=value lines"
        ) from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        name, equals, text = line.strip().partition("=")
        try:
            words = shlex.split(text, posix=True)
        except ValueError:
            words = ["", ""]
        if not equals or not NAME.fullmatch(name) or (len(words) > 1 and text[:1] in ("'", '"')):
            raise ConfigurationError(
                f"--env-file {path}, line {number}: not NAME=value; put a value with quotes in quotes"
            )
        found[name] = words[0] if len(words) == 1 else text.strip()
    return found
