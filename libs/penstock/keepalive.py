"""TCP keepalive: the kernel notices a peer that vanished without closing the connection. Both ends of a
standing connection set it."""

import socket

IDLE_S = 10
INTERVAL_S = 3
PROBES = 2
BROKEN_AFTER_S = IDLE_S + INTERVAL_S * PROBES  # of silence, also with data under way

SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, BROKEN_AFTER_S * 1_000),
)
"""(level, option, value). Sockets that a listening one accepts inherit them."""


def keep_alive(found: socket.socket) -> None:
    for option in SOCKET_OPTIONS:
        found.setsockopt(*option)
