"""Bounds of an HTTP server on how long a request may arrive, and on connections per peer; apart from the server, which is slow to import."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Bounds of one server. Sources: as Apache's `mod_reqtimeout` and nginx' `client_header_timeout`, in their defaults or below."""

    headers_within_s: float = 20.0
    """From the opening of the connection, or the first byte of its next request, to the end of the headers."""
    body_within_s: float = 20.0
    """From the end of the headers to the end of the body; each `body_bytes_per_s` that arrive extend it by a second."""
    body_bytes_per_s: int = 500
    header_bytes: int = 64 << 10
    """Of request line and headers, and of what arrives together with them."""
    waiting_per_peer: int = 1_024
    """Connections of one address on which a request is awaited or incomplete. One with an answer under way does not count."""


LIMITS = Limits()
