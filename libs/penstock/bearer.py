"""Bearer tokens in files, as clients of the gateway read them."""

import re
from pathlib import Path

from penstock.errors import ConfigurationError

TOKEN = re.compile(r"[!-~]{1,4096}")
"""What one HTTP header takes: RFC 6750's tokens are printable ASCII without spaces."""


def bearer_token(path: Path, setting: str) -> str:
    """The only word in this file. Raises `ConfigurationError` that names the setting and never holds what is in the file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise ConfigurationError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    if TOKEN.fullmatch(text) is None:
        raise ConfigurationError(
            f"{setting}: {path} does not hold one token and nothing else; write there what `penstock token` printed"
        )
    return text
