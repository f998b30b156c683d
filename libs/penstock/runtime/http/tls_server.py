"""TLS of servers: a certificate and its key are tried before use, so that a pair which every client would
refuse is a configuration error."""

import ssl
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError, unreadable
from penstock.private_files import read_private

MAX_FLIGHTS = 4  # flights of messages in a handshake, in either direction


def server_context(certificate: Path, key: Path, settings: tuple[str, str]) -> ssl.SSLContext:
    """TLS 1.2 or later with this certificate. Raises `ConfigurationError` that names the setting at fault and
    the remedy."""
    for_certificate, for_key = settings
    _check_readable(for_certificate, certificate)
    read_private(for_key, key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _no_passphrase(for_key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"{for_key}: {key} is not the key of the certificate {certificate}; give the one that it was "
                "made for"
            ) from error
        raise ConfigurationError(
            f"{for_certificate}, {for_key}: {certificate} and {key} cannot be used ({error}); give PEM "
            "files: the certificate, followed by those between it and its authority, and its key"
        ) from error
    shake_hands(context, certificate, for_certificate)
    return context


def _check_readable(setting: str, path: Path) -> None:
    """Raises `ConfigurationError`."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(setting, path, error) from error


def _no_passphrase(setting: str) -> str:
    raise ConfigurationError(
        f"{setting}: the key has a passphrase, which cannot be typed here; give it without (`openssl pkey`), "
        "mode 0600"
    )


def shake_hands(context: ssl.SSLContext, certificate: Path, setting: str) -> dict[str, Any]:
    """Handshake of the context with a client in memory that trusts the certificate; returns the certificate
    that the client received."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = trusting.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(MAX_FLIGHTS):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"{setting}: every client would refuse {certificate} ({error.verify_message}); renew it"
        ) from error
    return ends[0].getpeercert() or {}
