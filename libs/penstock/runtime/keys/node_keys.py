"""Authentication of a node's events: an Ed25519 signature on each, and a message authentication code at 1/50
of the cost.

The signature alone proves the sender, to any placer and at any time. Verifying it costs 130 µs, a third of a
placer's time for a job; so node and placer agree on a secret (X25519: the node's key is registered when it
joins, the placer's is one per process, on each order that it sends), and the placer accepts the code in place
of the signature. A placer without this secret, such as one that has just started, verifies the signature.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path

from penstock.errors import ConfigurationError, unreadable
from penstock.model.wire.envelope import SIGNATURE, Headers
from penstock.runtime.keys.signatures import MAX_KEYS, SEED_BYTES, ExchangeKey, SigningKey, verify

PLACER_KEY = "placerkey"
"""Header of an order: the X25519 public key of the placer that sent it."""
CODE = "mac"
"""Header of a node's event: the first characters of the placer's key and the code,
with a colon between them."""
CODE_BYTES = 16
OPERATOR_KEY = "PENSTOCK_OPERATOR_KEY"
"""Variable of gateway and placer: a file with a key that both have, or `trust-log`."""
TRUST_LOG = "trust-log"
"""In place of a file: every writer of the nodes' topic may act as an operator."""
NAMED = 8  # characters of the placer's key
CONTEXT = b"penstock node and placer\0"


def _secret(own: ExchangeKey, other: str, node: str, placer: str) -> bytes | None:
    shared = own.shared(other)
    return None if shared is None else sha256(CONTEXT + shared + node.encode() + placer.encode()).digest()


def _code(secret: bytes, data: bytes) -> bytes:
    return blake2b(data, key=secret, digest_size=CODE_BYTES).hexdigest().encode()


OPERATOR = b"operator:"
"""Prefix of the code on events about nodes that the gateway writes."""


def operators_code(key: bytes, data: bytes) -> tuple[str, bytes]:
    """The header by which the placer recognises the gateway; both have the key."""
    return CODE, OPERATOR + _code(sha256(key).digest(), data)


def by_gateway(key: bytes, headers: Headers, data: bytes) -> bool:
    """Whether `data` was written with the key."""
    return compare_digest(dict(headers).get(CODE, b""), operators_code(key, data)[1])


def operator_key(env: Mapping[str, str] = os.environ) -> bytes | None:
    """The content of the file `PENSTOCK_OPERATOR_KEY`;
    None: the log is trusted. Raises `ConfigurationError`."""
    path = env.get(OPERATOR_KEY)
    if path == TRUST_LOG:
        return None
    if not path:
        raise ConfigurationError(
            f"{OPERATOR_KEY}: not set; give gateway and placer one file of {SEED_BYTES} random bytes, mode "
            f"0600 (head -c {SEED_BYTES} /dev/urandom), which signs what operators do to nodes. Only where "
            f"no one else can write to the log: {TRUST_LOG}"
        )
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            key = file.read()
    except OSError as error:
        raise unreadable(OPERATOR_KEY, path, error) from error
    if mode & 0o007 or len(key) < SEED_BYTES:
        raise ConfigurationError(
            f"{OPERATOR_KEY}: {path} must hold at least {SEED_BYTES} random bytes that others cannot read; "
            f"it has {len(key)}, and mode {mode:04o}"
        )
    return key


def key_file_at(path: Path) -> Path:
    """Writes a new key to this path unless it has one, and returns the path; concurrent calls all get the
    first call's key."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600
            file.write(os.urandom(SEED_BYTES))
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, path)
    return path


class NodeKeys:
    """A node's two private keys, both from one seed of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        """Raises `ValueError` for another length."""
        self._signing = SigningKey(seed)
        self._exchange = ExchangeKey(sha256(b"exchange" + seed).digest())
        self.public_key = self._signing.public_key + self._exchange.public_key
        """Both public keys, as `NodeJoined` carries them."""
        self._placer = ""
        self._secret: bytes | None = None

    def meet(self, headers: Headers) -> None:
        """Derives the secret shared with the placer whose order has these headers."""
        placer = next((raw.decode("latin-1") for name, raw in headers if name == PLACER_KEY), "")
        if placer and placer != self._placer:
            self._placer = placer
            self._secret = _secret(self._exchange, placer, self._exchange.public_key, placer)

    def sign(self, data: bytes) -> bytes:
        """The signature alone, in base64: for other nodes (`signed_by`). Not for concurrent use."""
        return self._signing.sign(data)

    def proofs(self, data: bytes) -> Headers:
        """The headers that prove the sender of `data`."""
        signature = (SIGNATURE, self._signing.sign(data))
        if self._secret is None:
            return (signature,)
        return signature, (CODE, self._placer[:NAMED].encode() + b":" + _code(self._secret, data))


def signed_by(public_key: str, signature: bytes, data: bytes) -> bool:
    """Whether the node with these public keys has signed `data` (`NodeKeys.sign`)."""
    return verify(public_key[: len(public_key) // 2], signature, data)


class PlacerKeys:
    """Keys of one placer process: its own for orders, and those that verify nodes' events."""

    def __init__(self, seed: bytes) -> None:
        self._exchange = ExchangeKey(seed)
        self.header = (PLACER_KEY, self._exchange.public_key.encode())
        self._secret_with = lru_cache(maxsize=MAX_KEYS)(self._agree)

    def _agree(self, node: str) -> bytes | None:
        return _secret(self._exchange, node, node, self._exchange.public_key)

    def proven(self, public_key: str, headers: Headers, data: bytes) -> bool:
        """Whether the node with these public keys sent `data`."""
        found = dict(headers)
        signing, exchange = public_key[: len(public_key) // 2], public_key[len(public_key) // 2 :]
        named, _, code = found.get(CODE, b"").partition(b":")
        if code and named == self._exchange.public_key[:NAMED].encode():
            secret = self._secret_with(exchange)
            if secret is not None and compare_digest(code, _code(secret, data)):
                return True
        signature = found.get(SIGNATURE)
        return signature is not None and verify(signing, signature, data)
