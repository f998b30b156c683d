"""User id of the peer of a loopback connection, by the kernel's socket diagnosis (netlink, `sock_diag(7)`).

Exact look-up of one connection, without privileges, O(1); `/proc/net/tcp` has the same and lists every
socket.
"""

import socket
import struct

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ANY_STATE = 0xFFFFFFFF
HEADER = struct.Struct("=IHHII")  # nlmsghdr
ASKED = struct.Struct("=BBBBI")  # inet_diag_req_v2 up to its sockid
PORTS = struct.Struct("!HH")
NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface
UID_AT = HEADER.size + 4 + 48 + 12  # behind family and state, the sockid, three counters
FOUND = struct.Struct("=II")  # uid, inode

Address = tuple[str, int]


class Peers:
    """One socket to the kernel.
    Raises OSError where there is no such service (a kernel without `inet_diag`)."""

    def __init__(self) -> None:
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
        self._asked = 0

    def uid(self, peer: Address, own: Address) -> int | None:
        """The user who created the socket at `peer`, which is connected to `own`, both on this machine.

        None if no process holds it any more: a closed socket has no user, and the kernel would call it
        root's.
        """
        self._asked = self._asked % 0xFFFFFFFF + 1
        self._kernel.send(_question(self._asked, peer, own))
        while True:
            answer = self._kernel.recv(1_024)  # the kernel answers within the call above
            _, kind, _, number, _ = HEADER.unpack_from(answer)
            if number == self._asked:
                break
        if kind != SOCK_DIAG_BY_FAMILY or len(answer) < UID_AT + FOUND.size:
            return None
        uid, inode = FOUND.unpack_from(answer, UID_AT)
        return uid if inode else None


def _question(number: int, peer: Address, own: Address) -> bytes:
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    places = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (peer, own))
    body = ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, ANY_STATE)
    body += PORTS.pack(peer[1], own[1]) + places + NO_COOKIE
    return HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, number, 0) + body
