"""File of bearer tokens: mode 0600, read again whenever it has changed, so that a token is revoked by
deleting its line."""

import os
from pathlib import Path

from penstock.errors import ConfigurationError
from penstock.private_files import read_private_text
from penstock_services.gateway.core.access import Caller, Tokens, digest, parse_tokens

VARIABLE = "PENSTOCK_TOKENS"
_Version = tuple[int, int, int, int]


class TokenFile:
    """One file. Each look-up costs a stat; a file that became invalid admits no caller."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigurationError` that names the line and the remedy."""
        self._path = path
        self._version, self._tokens = self._read()

    @property
    def count(self) -> int:
        """Number of tokens when the file was last read."""
        return len(self._tokens)

    def caller(self, token: bytes) -> Caller | None:
        """The caller with this token, from the present file. Raises `ConfigurationError`."""
        return self._latest().get(digest(token))

    def digests_of(self, node_id: str) -> list[bytes]:
        """SHA-256 of each token of this node's reporter,
        from the present file. Raises `ConfigurationError`."""
        return [found for found, caller in self._latest().items() if caller.node == node_id]

    def _latest(self) -> Tokens:
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise ConfigurationError(f"{VARIABLE}: {self._path} cannot be read: {error.strerror}") from error
        if _version(status) != self._version:
            self._version, self._tokens = self._read()
        return self._tokens

    def _read(self) -> tuple[_Version, Tokens]:
        text, status = read_private_text(VARIABLE, self._path)
        try:
            return _version(status), parse_tokens(text)
        except ValueError as error:
            raise ConfigurationError(f"{VARIABLE}: {self._path}: {error}") from error


def _version(status: os.stat_result) -> _Version:
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
