"""Bounds of an HTTP server: how long a request may arrive, and connections per peer.

Apart from the server, which is slow to import.
"""

from typing import NamedTuple


class Limits(NamedTuple):
    """Bounds of one server. Times and rate: the defaults of Apache's `mod_reqtimeout`."""

    headers_within_s: float = 20.0
    """From the connection's opening, or the first byte of its next request, to the end of the headers."""
    body_within_s: float = 20.0
    """From the end of the headers to the end of the body, and a second for each `body_bytes_per_s`."""
    body_bytes_per_s: int = 500
    header_bytes: int = 64 << 10
    """Of request line and headers, and of what arrives together with them."""
    waiting_per_peer: int = 1_024
    """Connections of one address on which a request is awaited or incomplete;
    none with an answer under way."""


LIMITS = Limits()
