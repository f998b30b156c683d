"""Bearer token of a client of the gateway, read from a file."""

import re
from pathlib import Path

from penstock.errors import ConfigurationError, unreadable

TOKEN = re.compile(r"[!-~]{1,4096}")
"""The tokens that one HTTP header takes: printable ASCII without spaces (RFC 6750)."""


def bearer_token(path: Path, setting: str) -> str:
    """The only word in this file. Raises `ConfigurationError` that names the setting and never contains the
    file's text."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise unreadable(setting, path, error) from error
    if TOKEN.fullmatch(text) is None:
        raise ConfigurationError(
            f"{setting}: {path} does not hold one token and nothing else; write there what `penstock token` "
            "printed"
        )
    return text
