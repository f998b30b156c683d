"""Ed25519 signatures (RFC 8032) and X25519 key agreement (RFC 7748) by the OpenSSL of Python's `ssl`, through
ctypes.

A package for this would be one more compiled dependency for a few calls. Signing costs about 50 µs, verifying
or agreeing 130 µs.
"""

import base64
import ctypes
import ctypes.util
import ssl
from functools import cache, lru_cache
from typing import Any

from penstock.errors import ConfigurationError

SEED_BYTES = KEY_BYTES = 32
SIGNATURE_BYTES = 64
EVP_PKEY_X25519, EVP_PKEY_ED25519 = 1034, 1087
MAX_KEYS = 20_000  # parsed keys in memory, ≈ 1 KiB each; more nodes than any cell has

_P, _C, _N = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "EVP_PKEY_new_raw_private_key": (_P, [ctypes.c_int, _P, _C, _N]),
    "EVP_PKEY_new_raw_public_key": (_P, [ctypes.c_int, _P, _C, _N]),
    "EVP_PKEY_get_raw_public_key": (ctypes.c_int, [_P, _C, ctypes.POINTER(_N)]),
    "EVP_PKEY_free": (None, [_P]),
    "EVP_MD_CTX_new": (_P, []),
    "EVP_MD_CTX_free": (None, [_P]),
    "EVP_DigestSignInit": (ctypes.c_int, [_P, _P, _P, _P, _P]),
    "EVP_DigestSign": (ctypes.c_int, [_P, _C, ctypes.POINTER(_N), _C, _N]),
    "EVP_DigestVerifyInit": (ctypes.c_int, [_P, _P, _P, _P, _P]),
    "EVP_DigestVerify": (ctypes.c_int, [_P, _C, _N, _C, _N]),
    "EVP_PKEY_CTX_new": (_P, [_P, _P]),
    "EVP_PKEY_CTX_free": (None, [_P]),
    "EVP_PKEY_derive_init": (ctypes.c_int, [_P]),
    "EVP_PKEY_derive_set_peer": (ctypes.c_int, [_P, _P]),
    "EVP_PKEY_derive": (ctypes.c_int, [_P, _C, ctypes.POINTER(_N)]),
    "ERR_clear_error": (None, []),
}


@cache
def _openssl() -> Any:
    """The OpenSSL library. Raises `ConfigurationError` where there is none."""
    import _ssl

    places = (getattr(_ssl, "__file__", None), ctypes.util.find_library("crypto"), "libcrypto.so.3")
    for place in filter(None, places):
        try:
            library = ctypes.CDLL(place)
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            continue
        return library
    raise ConfigurationError(
        f"no OpenSSL library with Ed25519 was found ({ssl.OPENSSL_VERSION} is linked into Python); install "
        "libssl3"
    )


class _Key:
    """One parsed key, freed with this object."""

    def __init__(self, kind: int, raw: bytes, *, private: bool) -> None:
        """Raises `ValueError`."""
        self._lib = _openssl()
        new = self._lib.EVP_PKEY_new_raw_private_key if private else self._lib.EVP_PKEY_new_raw_public_key
        self.pointer = new(kind, None, raw, len(raw)) if len(raw) == KEY_BYTES else None
        if not self.pointer:
            self._lib.ERR_clear_error()
            raise ValueError(f"not a key of {KEY_BYTES} bytes")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._lib.EVP_PKEY_free(self.pointer)

    def public_text(self) -> str:
        """The public half, in URL-safe base64 without padding."""
        raw, size = ctypes.create_string_buffer(KEY_BYTES), _N(KEY_BYTES)
        if self._lib.EVP_PKEY_get_raw_public_key(self.pointer, raw, ctypes.byref(size)) != 1:
            raise MemoryError("OpenSSL cannot read a key")
        return base64.urlsafe_b64encode(raw.raw).rstrip(b"=").decode()


class ExchangeKey:
    """An X25519 private key: with the public key of another it gives a secret
    that only the two owners have."""

    def __init__(self, seed: bytes) -> None:
        """Raises `ValueError` for another length than 32 bytes."""
        self._lib = _openssl()
        self._key = _Key(EVP_PKEY_X25519, seed, private=True)
        self.public_key = self._key.public_text()

    def shared(self, public_key: str) -> bytes | None:
        """The shared secret, 32 bytes, to be hashed before use;
        None for a text that is not a usable public key."""
        other = _public(EVP_PKEY_X25519, public_key)
        if other is None:
            return None
        context = self._lib.EVP_PKEY_CTX_new(self._key.pointer, None)
        try:
            secret, size = ctypes.create_string_buffer(KEY_BYTES), _N(KEY_BYTES)
            done = (
                self._lib.EVP_PKEY_derive_init(context) == 1
                and self._lib.EVP_PKEY_derive_set_peer(context, other.pointer) == 1
                and self._lib.EVP_PKEY_derive(context, secret, ctypes.byref(size)) == 1
            )
            self._lib.ERR_clear_error()
            return secret.raw if done else None
        finally:
            self._lib.EVP_PKEY_CTX_free(context)


class SigningKey:
    """An Ed25519 private key from its seed of 32 random bytes. Not for concurrent use."""

    def __init__(self, seed: bytes) -> None:
        """Raises `ValueError` for another length."""
        self._lib = _openssl()
        self._key = _Key(EVP_PKEY_ED25519, seed, private=True)
        self.public_key = self._key.public_text()
        """The public key in the form of `NodeJoined`."""
        self._context = self._lib.EVP_MD_CTX_new()
        self._signature, self._size = ctypes.create_string_buffer(SIGNATURE_BYTES), _N(SIGNATURE_BYTES)
        if self._lib.EVP_DigestSignInit(self._context, None, None, None, self._key.pointer) != 1:
            raise MemoryError("OpenSSL cannot sign")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._lib.EVP_MD_CTX_free(self._context)

    def sign(self, data: bytes) -> bytes:
        """The signature in base64."""
        self._size.value = SIGNATURE_BYTES
        # reset with the same key, without a new look-up of the algorithm: a third less time with cold caches
        ready = self._lib.EVP_DigestSignInit(self._context, None, None, None, None) == 1
        size = ctypes.byref(self._size)
        if not ready or self._lib.EVP_DigestSign(self._context, self._signature, size, data, len(data)) != 1:
            raise MemoryError("OpenSSL cannot sign")
        return base64.b64encode(self._signature.raw)


@lru_cache(maxsize=MAX_KEYS)
def _public(kind: int, text: str) -> _Key | None:
    """The parsed public key; None for a text that is not one."""
    try:
        return _Key(kind, base64.urlsafe_b64decode(text + "="), private=False)
    except ValueError:
        return None


def verify(public_key: str, signature: bytes, data: bytes) -> bool:
    """Whether this signature (base64) of `data` was made with that key."""
    key = _public(EVP_PKEY_ED25519, public_key)
    try:
        raw = base64.b64decode(signature, validate=True)
    except ValueError:
        return False
    if key is None or len(raw) != SIGNATURE_BYTES:
        return False
    library = _openssl()
    context = library.EVP_MD_CTX_new()
    try:
        ready = library.EVP_DigestVerifyInit(context, None, None, None, key.pointer) == 1
        if ready and library.EVP_DigestVerify(context, raw, len(raw), data, len(data)) == 1:
            return True
        library.ERR_clear_error()
        return False
    finally:
        library.EVP_MD_CTX_free(context)
