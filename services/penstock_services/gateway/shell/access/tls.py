"""TLS certificate and key of the gateway, checked at the start and renewed without a restart: a pair that
every client would refuse is never used."""

import logging
import ssl
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.runtime.http.tls_server import server_context, shake_hands

CERTIFICATE, KEY = "PENSTOCK_GATEWAY_TLS_CERT", "PENSTOCK_GATEWAY_TLS_KEY"

logger = logging.getLogger(__name__)


class ServerCertificate:
    """Certificate for new connections: the files as they were at the start,
    or at the last `renew` that succeeded."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises `ConfigurationError` as `server_context` does."""
        self._certificate, self._key = certificate, key
        self.context = self._latest = server_context(certificate, key, (CERTIFICATE, KEY))
        """For the listening server, for as long as it runs. Handshakes use the latest context: replaced as a
        whole, never altered."""
        self.context.sni_callback = self._led_by_latest

    def renew(self) -> None:
        """Reads both files again. An unusable one is logged, and the present certificate stays in use."""
        try:
            self._latest = server_context(self._certificate, self._key, (CERTIFICATE, KEY))
        except ConfigurationError as error:
            logger.error("the certificate in use stays: %s", error)
            return
        logger.info("new connections are shown %s as it is now", self._certificate)

    def _led_by_latest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """OpenSSL calls this for each handshake, also for one that names no server."""
        connection.context = self._latest


def certificate_shown(certificate: Path, key: Path) -> dict[str, Any]:
    """The certificate as clients see it, as `ssl.SSLSocket.getpeercert` has it. Raises `ConfigurationError`
    as `server_context` does."""
    context = server_context(certificate, key, (CERTIFICATE, KEY))
    return shake_hands(context, certificate, CERTIFICATE)
