"""TLS of clients: the certificate authorities that they trust,
and the remedy where client and server do not fit."""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from penstock.errors import ConfigurationError

SYSTEM_CA = "system"
"""Stands for the authorities that this machine trusts."""
PROBE_TIMEOUT_S = 2.0


def client_context(ca: str, setting: str) -> ssl.SSLContext:
    """Checks certificates and names of servers. `ca`: PEM file, or `SYSTEM_CA`. Raises `ConfigurationError`
    that names `setting`."""
    try:
        return ssl.create_default_context(cafile=None if ca == SYSTEM_CA else ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{setting}={ca}: {error}; name a PEM file with the authority's certificate, or {SYSTEM_CA}"
        ) from error


def speaks_tls(host: str, port: int) -> bool:
    """Whether a server there takes part in a TLS handshake; no data follows, so its certificate does not
    matter. Blocks for PROBE_TIMEOUT_S at most."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        suppress(OSError),
        socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        return True
    return False


def misfit(
    error: BaseException | None,
    url: str,
    ca: str,
    setting: str,
    asks: Callable[[str, int], bool] = speaks_tls,
) -> str | None:
    """Why a request to `url` can never succeed with the settings of both ends, and the remedy; None: they are
    not the cause.

    `asks`: whether the server speaks TLS, where an unencrypted request got no answer.
    """
    causes = tuple(_causes(error))
    host = urlsplit(url).hostname or ""
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not accepted ({cause.verify_message}): {setting} must name the "
                f"authority that signed it, and the certificate must name {host}; it is {ca}"
            )
        if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
            return None
        if isinstance(cause, ssl.SSLError):
            return f"it does not speak TLS as this machine does ({cause.reason}); write http:// for none"
    away = any(isinstance(cause, OSError) and not isinstance(cause, ConnectionResetError) for cause in causes)
    if causes and not away and url.startswith("http://") and asks(host, urlsplit(url).port or 80):
        return "it speaks TLS only; write https://"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the errors from which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
