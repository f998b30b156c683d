"""Checks of what is on other machines: the log, Postgres, their certificates and their clocks. Nothing is created there."""

import asyncio
import email.utils
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from penstock.cli.doctor import Finding
from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.log.open import log_hosts, open_log
from penstock.log.port import Partition
from penstock.model.topics import Topic
from penstock.redaction import without_password
from penstock.tls import SYSTEM_CA, client_context

REACH_S = 8.0  # for a server to answer
MAX_CLOCK_OFF_S = 5.0  # a Date header has whole seconds; leases and deadlines bear this much
MIN_DAYS = 14  # of a certificate: time to renew it
OPEN_DATABASE = (
    "create the roles (`python -m penstock.local.postgres_setup`) and give this service its own URL"
)


def log_findings(url: str, *, node: bool) -> Iterator[Finding]:
    """Whether it can be reached with this identity, and has Penstock's topics. `node`: those of a node-reporter."""
    for host, port in log_hosts(url):
        problem = _unreachable(host, port)
        if problem:
            yield Finding(
                "log",
                f"{host}:{port}: {problem}",
                "start it, or mend the network, a firewall or the log's URL",
            )
            return
    if not url.startswith("kafka://"):
        yield from asyncio.run(_database("log", url, "penstock_log"))
        return
    yield from _kafka_certificate(url)
    topic = Topic.ORDERS if node else Topic.LEDGER
    count = asyncio.run(_end(url, Partition(topic, 0)))
    yield Finding("log", f"{without_password(url)}: {topic} has {count} records")


async def _end(url: str, partition: Partition) -> int:
    log = open_log(url, "doctor")
    try:
        async with asyncio.timeout(REACH_S):
            await log.start()
            return (await log.end_offsets([partition]))[partition]
    except TimeoutError:
        raise LogError(f"no answer within {REACH_S:.0f} s; look at the broker's log") from None
    finally:
        with suppress(LogError):
            await log.close()


def _kafka_certificate(url: str) -> Iterator[Finding]:
    _, _, ca = url.partition("?ca=")
    if ca:
        context = client_context(ca, "ca")
        for host, port in log_hosts(url):
            yield certificate_of(f"certificate of {host}", host, port, context)


def certificate_of(what: str, host: str, port: int, context: ssl.SSLContext) -> Finding:
    """Of a server, as we are shown it: its names and its end."""
    try:
        with (
            socket.create_connection((host, port), timeout=REACH_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as encrypted,
        ):
            shown: dict[str, Any] = encrypted.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        remedy = f"the authority that signed it must be the one named here, and it must name {host}"
        return Finding(what, f"not accepted: {error.verify_message}", remedy)
    except OSError as error:
        return Finding(what, f"no TLS there: {error}", "give the port that encrypts")
    return dated(what, shown["notAfter"], f"for {names_of(shown)}", f"the certificate of {host}")


def names_of(shown: Mapping[str, Any]) -> str:
    """The hosts that a certificate, as `getpeercert` has it, is for."""
    return ", ".join(name for _, name in shown.get("subjectAltName", ())) or "no host"


def database_findings(dsn: str) -> Iterator[Finding]:
    """Postgres for read models: reachable, as whom, how its clock goes."""
    yield from asyncio.run(_database("Postgres", dsn, None))


async def _database(what: str, dsn: str, schema: str | None) -> list[Finding]:
    """`schema`: what a set-up has made there."""
    shown = without_password(dsn)
    try:
        connection = await asyncpg.connect(dsn, timeout=REACH_S)
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        return [Finding(what, f"{shown}: {error}", OPEN_DATABASE)]
    except asyncpg.InvalidCatalogNameError as error:
        return [Finding(what, f"{shown}: {error}", "create the database, or name the one that there is")]
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        return [
            Finding(
                what,
                f"{shown}: {error or 'no answer'}",
                "start it, or mend the network, pg_hba.conf or the URL",
            )
        ]
    try:
        before_ms = wall_ms()
        role, superuser, version, now = await connection.fetchrow(
            "SELECT current_user, rolsuper, current_setting('server_version'), clock_timestamp() "
            "FROM pg_roles WHERE rolname = current_user"
        )
        off_s = now.timestamp() - (before_ms + wall_ms()) / 2_000
        there = schema is None or await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema)
    finally:
        await connection.close()
    rights = ", an administrator: infra/README.md has a role for each service" if superuser else ""
    missing = "" if there else f"it has no log yet: {OPEN_DATABASE}, or start the placer"
    return [
        Finding(what, f"PostgreSQL {version} at {shown} as {role}{rights}", missing),
        _clock(off_s, "Postgres"),
    ]


def gateway_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a standing connection is set, the gateway's certificate, and its clock by the date of its answer."""
    url = env.get("PENSTOCK_NODE_GATEWAY")
    if not url:
        remedy = "set PENSTOCK_NODE_GATEWAY: by its standing connection a dead machine is noticed within half a minute"
        yield Finding("standing connection", "none", remedy)
        return
    import httpx

    place = urlsplit(url)
    ca = env.get("PENSTOCK_NODE_CA") or SYSTEM_CA
    context = client_context(ca, "PENSTOCK_NODE_CA")
    if place.scheme == "https" and place.hostname:
        yield certificate_of("gateway's certificate", place.hostname, place.port or 443, context)
    with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
        date = httpx.get(f"{url}/v1/status", verify=context, trust_env=False, timeout=REACH_S).headers.get(
            "date"
        )
        if date:
            off_s = email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - wall_ms() / 1_000
            yield _clock(off_s, "the gateway")


def dated(what: str, not_after: str, found: str, where: object) -> Finding:
    """A certificate's end, as OpenSSL writes it."""
    days = (ssl.cert_time_to_seconds(not_after) - wall_ms() / 1_000) / 86_400
    remedy = "" if days >= MIN_DAYS else f"renew {where}"
    return Finding(what, f"{found}; until {not_after}, {days:.0f} days", remedy)


def _clock(off_s: float, of: str) -> Finding:
    remedy = "" if abs(off_s) < MAX_CLOCK_OFF_S else "set both clocks (NTP: chrony or systemd-timesyncd)"
    return Finding("clock here", f"within {max(abs(off_s), 0.1):.1f} s of that of {of}", remedy)


def _unreachable(host: str, port: int) -> str:
    """Why no connection is made; empty: it is."""
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
