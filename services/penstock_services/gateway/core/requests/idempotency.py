"""Idempotency keys: a submission that is repeated with its key gets the id of the first one."""

import base64
from hashlib import sha256

from penstock_services.gateway.core.problems import BadField, invalid

MAX_KEY_CHARS = 256
SEPARATOR = "\x1f"  # between tenant and key
KEYED_CHARS = 24  # 120 bits: two keys of one cell never collide
RANDOM_BYTES = 7  # 56 bits after the millisecond
CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789abcdefghjkmnpqrstvwxyz")


def _base32(raw: bytes) -> str:
    """Crockford's alphabet, lower case, no padding; sorts as the bytes do."""
    return base64.b32encode(raw).rstrip(b"=").translate(CROCKFORD).decode()


def keyed_job_id(cell: str, key: str) -> str:
    """The job id of this key: the same in every gateway and after every crash."""
    return "k" + _base32(sha256(f"{cell}\0{key}".encode()).digest())[:KEYED_CHARS]


def fresh_job_id(now_ms: int, random: bytes) -> str:
    """An id for a submission without a key; ids of later milliseconds sort later."""
    return "j" + _base32(now_ms.to_bytes(6, "big") + random[:RANDOM_BYTES])


def checked_key(key: str | None) -> str | None:
    """The idempotency key, if it is usable. Raises `Problem`."""
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        field = BadField(
            "Idempotency-Key", f"has {len(key)} characters", f"give 1 to {MAX_KEY_CHARS} printable characters"
        )
        raise invalid("the header cannot be used", [field])
    return key


def tenants_key(tenant: str | None, key: str) -> str:
    """Keys of two tenants never collide: a client's key contains no control character."""
    return key if tenant is None else f"{tenant}{SEPARATOR}{key}"


def own_key(key: str) -> str:
    """The key as the client sent it."""
    return key.rpartition(SEPARATOR)[2]
