"""Authentication of requests for logs at a node-reporter: a message authentication code, with a secret that
gateway and node share.

The secret is derived from the SHA-256 hash of the node's token, which the gateway stores, or is a file that
both have. It is never sent: a machine that has taken over a node's address receives nothing with which it
could request logs.
"""

from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigurationError
from penstock.private_files import read_private
from penstock.session_lines import BadLine

VARIABLE = "PENSTOCK_NODE_LOG_KEY"
SCHEME = "Penstock"
OFFSET = "penstock-offset"
"""Header of each answer of a node-reporter: its first offset in the log; 0 in a refusal.
Other servers lack it."""
PATH, EXEC_PATH, ATTACH_PATH = "/v1/logs", "/v1/exec", "/v1/attach"
MIN_KEY_BYTES = 32
CONTEXT = b"penstock logs\0"
ID_CHARS = 16


class LogKey(NamedTuple):
    """A shared secret. `id` names it without revealing it."""

    id: str
    secret: bytes

    def authorization(self, node_id: str, query: str) -> str:
        """The `Authorization` header of a request for this node's logs."""
        return f"{SCHEME} {self._code(node_id, query)}"

    def admits(self, header: str, node_id: str, query: str) -> bool:
        """Whether the sender of a request with this `Authorization` has the secret."""
        scheme, _, code = header.partition(" ")
        return scheme == SCHEME and compare_digest(code.encode(), self._code(node_id, query).encode())

    def signed_line(self, nonce: str, number: int, text: bytes) -> bytes:
        """The line of this number in the session with this nonce, with its proof: nobody on the way can add,
        change or repeat one."""
        return self._line_code(nonce, number, text) + b" " + text + b"\n"

    def line_of(self, nonce: str, number: int, signed: bytes) -> bytes:
        """The line. Raises `BadLine`."""
        code, _, text = signed.partition(b" ")
        if not compare_digest(code, self._line_code(nonce, number, text)):
            raise BadLine("a line of a session is not the gateway's")
        return text

    def _line_code(self, nonce: str, number: int, text: bytes) -> bytes:
        return (
            blake2b(f"{nonce}\n{number}\n".encode() + text, key=self.secret, digest_size=16)
            .hexdigest()
            .encode()
        )

    def _code(self, node_id: str, query: str) -> str:
        return blake2b(f"{node_id}\n{query}".encode(), key=self.secret, digest_size=32).hexdigest()


def _key(secret: bytes) -> LogKey:
    return LogKey(sha256(CONTEXT + b"id" + secret).hexdigest()[:ID_CHARS], secret)


def key_of_token(digest: bytes) -> LogKey:
    """The key derived from a node's token. `digest`: SHA-256 of the token."""
    return _key(sha256(CONTEXT + digest).digest())


def key_in_file(path: Path) -> LogKey:
    """Raises `ConfigurationError`."""
    content, _ = read_private(VARIABLE, path)
    if len(content) < MIN_KEY_BYTES:
        raise ConfigurationError(
            f"{VARIABLE}: {path} holds {len(content)} bytes; give gateway and node-reporters one file of at "
            f"least {MIN_KEY_BYTES} random ones (head -c {MIN_KEY_BYTES} /dev/urandom), mode 0600"
        )
    return _key(sha256(CONTEXT + content).digest())
