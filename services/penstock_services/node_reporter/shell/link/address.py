"""Address of the node for other nodes' tasks: `--address`, else the one by which the kernel routes to the
log.

A node never announces loopback where the log is on another machine. Decision 132.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

from penstock.errors import ConfigurationError, LogError
from penstock.log.open import log_hosts

LOOPBACK = "127.0.0.1"
LOCAL_NAME = "localhost"
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
REMEDY = "give the address under which the other nodes reach this one: --address (PENSTOCK_NODE_ADDRESS)"

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


async def own_address(given: str | None, log_url: str) -> str:
    """The address that this node announces. Nothing is sent: a UDP socket is connected, which asks the kernel
    for the route.

    Raises `ConfigurationError` for an address that cannot be one of this node, `LogError` where there is no
    route or no name service yet, which may come.
    """
    hosts = log_hosts(log_url)
    if given is not None:
        await _check(given, hosts)
        return given
    found = await _routes(hosts) if hosts else [LOOPBACK]
    away = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if away:
        return away[0]
    for host, _ in hosts:
        if not _is_loopback(host):
            raise ConfigurationError(
                f"the log's host {host} is this machine's loopback address here ({found[0]}), where no other "
                f"node reaches it; {REMEDY}"
            )
    return found[0]


async def _check(given: str, hosts: Sequence[tuple[str, int]]) -> None:
    """Raises `ConfigurationError` where others cannot reach this node there,
    `LogError` for a name without an address."""
    try:
        addresses = [ipaddress.ip_address(given)]
    except ValueError:
        if not HOST.fullmatch(given):
            raise ConfigurationError(
                f"--address {given!r} is neither an IP address nor a host name; write it without brackets "
                "and port"
            ) from None
        addresses = [ipaddress.ip_address(LOOPBACK)] if _is_loopback(given) else await _resolved(given)
    for address in addresses:
        if address.is_unspecified or address.is_multicast or address.is_link_local:
            kind = "stands for all addresses" if address.is_unspecified else "is not reached over a router"
            raise ConfigurationError(f"--address {given}: {address} {kind}; {REMEDY}")
    if all(address.is_loopback for address in addresses) and any(not _is_loopback(host) for host, _ in hosts):
        away = next(host for host, _ in hosts if not _is_loopback(host))
        shown = given if given == str(addresses[0]) else f"{given} ({addresses[0]})"
        raise ConfigurationError(
            f"--address {shown} is loopback, but the log is on {away}: other nodes cannot reach this one so; "
            f"{REMEDY}"
        )


async def _resolved(name: str) -> list[IpAddress]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LogError(f"--address {name} has no address: {error.strerror}; {REMEDY}") from error
    return [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]


async def _routes(hosts: Sequence[tuple[str, int]]) -> list[str]:
    """This machine's address on the way to each address of the hosts.
    Raises `LogError` when there is none."""
    found, problems = [], []
    for host, port in hosts:
        try:
            places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError as error:
            problems.append(f"{host}: {error.strerror}")
            continue
        for family, kind, protocol, _, place in places:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(place)
                    address = probe.getsockname()[0]
            except OSError as error:
                problems.append(f"{place[0]}: {error.strerror}")
                continue
            if not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
                found.append(address)
    if not found:
        raise LogError(
            f"no route to the log ({'; '.join(problems)}), so this node's address is not known; {REMEDY}"
        )
    return found


def _is_loopback(host: str) -> bool:
    """By its text: a name that another machine would resolve otherwise is not one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOCAL_NAME
