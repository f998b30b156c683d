"""The gateway's certificate and key, tried at the start and renewed without one: what every client would refuse is never used."""

import logging
import ssl
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.private_files import read_private

CERTIFICATE, KEY = "PENSTOCK_GATEWAY_TLS_CERT", "PENSTOCK_GATEWAY_TLS_KEY"
MAX_FLIGHTS = 4  # of a handshake, in either direction

logger = logging.getLogger(__name__)


class ServerCertificate:
    """What new connections are shown: the files as they were at the start, or at the last `renew` that succeeded."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises `ConfigurationError` as `server_context` does."""
        self._certificate, self._key = certificate, key
        self.context = self._latest = server_context(certificate, key)
        """For the listening server, for as long as it runs. A handshake is led by the latest: replaced as a whole, never altered."""
        self.context.sni_callback = self._led_by_latest

    def renew(self) -> None:
        """Reads both files again. One that cannot be used is logged, and what is in use stays."""
        try:
            self._latest = server_context(self._certificate, self._key)
        except ConfigurationError as error:
            logger.error("the certificate in use stays: %s", error)
            return
        logger.info("new connections are shown %s as it is now", self._certificate)

    def _led_by_latest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """OpenSSL asks this for each handshake, also for one that names no server."""
        connection.context = self._latest


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or later with this certificate. Raises `ConfigurationError` that names setting and remedy."""
    _check_readable(CERTIFICATE, certificate)
    read_private(KEY, key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"{KEY}: {key} is not the key of the certificate {certificate}; give the one that it was made for"
            ) from error
        raise ConfigurationError(
            f"{CERTIFICATE}, {KEY}: {certificate} and {key} cannot be used ({error}); give PEM files: the certificate, "
            "followed by those between it and its authority, and its key"
        ) from error
    _try(context, certificate)
    return context


def _check_readable(setting: str, path: Path) -> None:
    """Raises `ConfigurationError`."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(
            f"{setting}: {path} cannot be read: {error.strerror}; name a PEM file"
        ) from error


def _no_passphrase() -> str:
    raise ConfigurationError(
        f"{KEY}: the key has a passphrase, which cannot be typed here; give it without (`openssl pkey`), mode 0600"
    )


def certificate_shown(certificate: Path, key: Path) -> dict[str, Any]:
    """What clients are shown, as `ssl.SSLSocket.getpeercert` has it. Raises `ConfigurationError` as `server_context` does."""
    return _try(server_context(certificate, key), certificate)


def _try(context: ssl.SSLContext, certificate: Path) -> dict[str, Any]:
    """Shakes hands with itself, in memory, as a client does that trusts the certificate; returns what that one is shown."""
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
            f"{CERTIFICATE}: every client would refuse {certificate} ({error.verify_message}); renew it"
        ) from error
    return ends[0].getpeercert() or {}
