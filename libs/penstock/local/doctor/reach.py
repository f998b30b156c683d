"""Reachability checks of servers: the log, Postgres, the gateway, their certificates and their clocks.
Nothing is created there."""

import asyncio
import email.utils
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg

from penstock.cli.operations.doctor import Finding
from penstock.clock import wall_ms
from penstock.errors import LogError, NotAllowed
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.kafka.topics import Found
from penstock.log.open import log_hosts, open_log
from penstock.log.port import Partition
from penstock.log.postgres.embedded_schema import VERSION, made_by
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import Topic
from penstock.runtime.database.migrations import load_migrations, schema_of
from penstock.text.redaction import without_password
from penstock.tls import SYSTEM_CA, client_context, speaks_tls

REACH_S = 8.0  # for a server to answer
MAX_CLOCK_OFF_S = 5.0  # a Date header has whole seconds; leases and deadlines bear this much
MIN_DAYS = 14  # of a certificate: time to renew it
PROBES_AT_ONCE = 32
EXPIRED, NOT_YET_VALID, WRONG_NAME = 10, 9, (62, 64)  # OpenSSL's X509_V_ERR_… of x509_vfy.h
PROJECTOR_TABLES = "penstock_services.projector.migrations"
SET_UP = "an administrator runs `python -m penstock.log.kafka_setup URL --rights infra/kafka/acls.yaml`"
UPGRADE = "run the version that made it, or a newer one, on this machine"
FETCH = (
    "open the node's port for this machine, or give its reporter another --log-bind "
    "(PENSTOCK_NODE_LOG_BIND) or --address"
)
Look = Callable[[asyncpg.Connection], Awaitable[Finding]]
OPEN_DATABASE = (
    "create the roles (`python -m penstock.local.postgres_setup`) and give this service its own URL"
)


def log_findings(url: str, *, node: bool, cell_index: int = 0) -> Iterator[Finding]:
    """Whether the log can be reached with this identity, and has Penstock's topics.
    `node`: those of a node-reporter."""
    open_log(url, "doctor")  # raises for one that is not well-formed
    there = []
    for host, port in log_hosts(url):
        problem = unreachable(host, port)
        if problem:
            remedy = "start it, or mend the network, a firewall or the log's URL"
            yield Finding("log", f"{host}:{port}: {problem}", remedy)
        else:
            there.append((host, port))
    if log_hosts(url) and not there:
        return
    if not url.startswith("kafka://"):
        yield from asyncio.run(_database("log", url, _log_tables))
        return
    yield from _kafka_certificate(url, there)
    yield from asyncio.run(_topics(url, Topic.ORDERS if node else Topic.LEDGER, cell_index))


async def _topics(url: str, first: Topic, cell_index: int) -> list[Finding]:
    """Whether the topics that this identity may see exist, and whether they could lose records."""
    shown = without_password(url)
    log = open_log(url, "doctor")
    assert isinstance(log, KafkaLog)
    try:
        async with asyncio.timeout(REACH_S):
            await log.start()
    except TimeoutError:
        await _close(log)
        problem = f"{shown}: it listens, but did not let this identity in within {REACH_S:.0f} s"
        return [
            Finding("log", problem, "mend name and password in the log's URL, or look at the broker's log")
        ]
    try:
        async with asyncio.timeout(3 * REACH_S):
            there, absent = await _visible(log, cell_index)
            if not there and not absent:
                return [Finding("topics", f"{shown}: no right on any", SET_UP)]
            lost = [str(wrong) for wrong in await log.topics.harmful(there)]
            end = (await log.end_offsets([Partition(first, cell_index)])) if first in there else {}
    except TimeoutError:
        return [Finding("log", f"{shown}: no answer about its topics", "look at the broker's log")]
    finally:
        await _close(log)
    findings = [Finding("log", f"{shown}: {first} has {count} records") for count in end.values()]
    if absent:
        findings.append(Finding("topics", f"missing: {', '.join(absent)}", SET_UP))
    if lost:
        findings.append(
            Finding("topics", f"could lose records: {'; '.join(lost)}", f"{SET_UP}, with --correct")
        )
    if not absent and not lost:
        findings.append(Finding("topics", f"{len(there)} in sight, none could lose records"))
    return findings


async def _visible(log: KafkaLog, cell_index: int) -> tuple[dict[str, Found], list[str]]:
    """Topics that this identity may see, and those of them that do not exist,
    or have no partition for this cell."""
    there: dict[str, Found] = {}
    absent = []
    for topic, partitions in topic_partitions(cell_index + 1).items():
        try:
            found = (await log.topics.describe([topic])).get(topic)
        except NotAllowed:
            continue
        if found is None:
            absent.append(topic)
        elif found.partitions < partitions:
            absent.append(f"{topic} (has {found.partitions} of {partitions} partitions)")
        else:
            there[topic] = found
    return there, absent


async def _close(log: KafkaLog) -> None:
    with suppress(LogError):
        await log.close()


def _kafka_certificate(url: str, hosts: Sequence[tuple[str, int]]) -> Iterator[Finding]:
    [ca] = parse_qs(urlsplit(url).query).get("ca", [""])
    if ca:
        context = client_context(ca, "ca")
        for host, port in hosts:
            yield certificate_of(f"certificate of {host}", host, port, context)
        return
    for host, port in hosts:
        if speaks_tls(host, port):
            yield Finding(
                "log", f"{host}:{port}: it speaks TLS", "add ?ca=FILE to the log's URL, of its authority"
            )


def certificate_of(what: str, host: str, port: int, context: ssl.SSLContext) -> Finding:
    """A server's certificate as this machine receives it: its names and its end."""
    try:
        with (
            socket.create_connection((host, port), timeout=REACH_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as encrypted,
        ):
            shown: dict[str, Any] = encrypted.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return Finding(what, f"not accepted: {error.verify_message}", _for_verdict(error.verify_code, host))
    except ssl.SSLError as error:
        return Finding(what, f"{host}:{port}: no TLS there ({error.reason})", "give the port that encrypts")
    except OSError as error:
        remedy = "start it, or mend the network, a firewall or the URL"
        return Finding(what, f"{host}:{port}: {error.strerror or error}", remedy)
    return dated(what, shown["notAfter"], f"for {names_of(shown)}", f"the certificate of {host}")


def _for_verdict(code: int, host: str) -> str:
    """The remedy for a certificate that OpenSSL refused with this code (X509_V_ERR_…)."""
    if code == EXPIRED:
        return f"renew the certificate of {host}, unless this machine's clock is wrong"
    if code == NOT_YET_VALID:
        return f"set the clocks of this machine and of the one that made it (`date` here: {time.ctime()})"
    if code in WRONG_NAME:
        return f"make a certificate that names {host}, or write the URL with a name that it has"
    return "name the authority that signed it, as a PEM file, in ?ca= or the setting that ends in CA"


def names_of(shown: Mapping[str, Any]) -> str:
    """The hosts of a certificate, given as `getpeercert` returns it."""
    return ", ".join(name for _, name in shown.get("subjectAltName", ())) or "no host"


def database_findings(dsn: str, cell: str) -> Iterator[Finding]:
    """Postgres for read models: whether it is reachable, with which role, its clock, and the version of the
    cell's tables."""
    yield from asyncio.run(_database("Postgres", dsn, lambda connection: _read_models(connection, cell)))


async def _database(what: str, dsn: str, look: Look) -> list[Finding]:
    """Checks of a Postgres. `look`: the check of the tables that a set-up or a service has made there."""
    shown = without_password(dsn)
    try:
        connection = await asyncpg.connect(dsn, timeout=REACH_S)
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        return [Finding(what, f"{shown}: {error}", OPEN_DATABASE)]
    except asyncpg.InvalidCatalogNameError as error:
        return [Finding(what, f"{shown}: {error}", "create the database, or name an existing database")]
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
        tables = await look(connection)
    except asyncpg.InsufficientPrivilegeError as error:
        return [Finding(what, f"{shown}: {error}", OPEN_DATABASE)]
    finally:
        await connection.close()
    rights = ", an administrator: infra/README.md has a role for each service" if superuser else ""
    found = f"PostgreSQL {version} at {shown} as {role}{rights}"
    return [Finding(what, found), tables, _clock(off_s, "Postgres")]


async def _log_tables(connection: asyncpg.Connection) -> Finding:
    """The version of the embedded log's tables."""
    what, made = "log's tables", await made_by(connection)
    if made == 0:
        return Finding(what, "none yet", f"{OPEN_DATABASE}, or start the placer")
    if made == VERSION:
        return Finding(what, f"as this version has them ({made})")
    set_up = "run the set-up of this version (`python -m penstock.local.postgres_setup`)"
    return Finding(
        what, f"version {made}, where this one has {VERSION}", UPGRADE if made > VERSION else set_up
    )


async def _read_models(connection: asyncpg.Connection, cell: str) -> Finding:
    """The migrations of the projector's tables, which are read by the placer, the estimator, the batcher, the
    migrator, the contention-guard and the gateway."""
    what, schema = "read models", schema_of(cell)
    if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.migrations") is None:
        return Finding(what, f"{schema} has no tables yet", "start the projector and look at its log")
    rows = await connection.fetch(f"SELECT name, sha256 FROM {schema}.migrations ORDER BY name")
    ours = {each.name: each.sha256 for each in load_migrations(PROJECTOR_TABLES)}
    strange = [row["name"] for row in rows if ours.get(row["name"]) != row["sha256"]]
    if strange:
        return Finding(what, f"{schema} was migrated by another version ({', '.join(strange)})", UPGRADE)
    waiting = sorted(ours.keys() - {row["name"] for row in rows})
    if waiting:
        remedy = "restart the projector in this version: it brings them up to date"
        return Finding(what, f"{schema} is of an older version: {', '.join(waiting)} not applied", remedy)
    return Finding(what, f"{schema} is at {rows[-1]['name'].removesuffix('.sql')}, as in this version")


def gateway_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a standing connection is set, the gateway's certificate,
    and its clock by the date of its answer."""
    url = env.get("PENSTOCK_NODE_GATEWAY")
    if not url:
        remedy = (
            "set PENSTOCK_NODE_GATEWAY: by its standing connection a dead machine is noticed within "
            "half a minute"
        )
        yield Finding("standing connection", "none", remedy)
        return
    import httpx

    place = urlsplit(url)
    ca = env.get("PENSTOCK_NODE_CA") or SYSTEM_CA
    context = client_context(ca, "PENSTOCK_NODE_CA")
    if place.scheme == "https" and place.hostname:
        yield certificate_of("gateway's certificate", place.hostname, place.port or 443, context)
    try:
        answer = httpx.get(f"{url}/v1/status", verify=context, trust_env=False, timeout=REACH_S)
        off_s = (
            email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - wall_ms() / 1_000
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if place.scheme != "https":  # else the certificate's finding covers it
            remedy = "start the gateway, or mend the network, a firewall or PENSTOCK_NODE_GATEWAY"
            yield Finding("standing connection", f"{url}: {error}", remedy)
    except (KeyError, ValueError):
        yield Finding("clock here", f"not compared: {url} gave no date")
    else:
        yield _clock(off_s, "the gateway")


def log_server_findings(servers: Sequence[tuple[str, str]], ca: str | None) -> Iterator[Finding]:
    """Whether the log servers of nodes (node, URL) are reached from here, which must be the gateway's
    machine. One finding for all that are, and one for each that is not.
    """
    context = client_context(ca or SYSTEM_CA, "PENSTOCK_NODE_LOG_CA")

    def look(server: tuple[str, str]) -> Finding:
        node, url = server
        place = urlsplit(url)
        host, port = place.hostname or "", place.port or 0
        what = f"output of {node}"
        if place.scheme == "https":
            return certificate_of(what, host, port, context)
        problem = unreachable(host, port)
        return Finding(what, f"{host}:{port}: {problem}", FETCH if problem else "")

    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        found = list(pool.map(look, servers))
    wrong = [finding for finding in found if finding.remedy]
    if len(wrong) < len(found):
        yield Finding("tasks' output", f"fetched from {len(found) - len(wrong)} of {len(found)} ready nodes")
    yield from wrong


def dated(what: str, not_after: str, found: str, where: object) -> Finding:
    """The finding about a certificate's end. `not_after`: as OpenSSL writes it."""
    days = (ssl.cert_time_to_seconds(not_after) - wall_ms() / 1_000) / 86_400
    remedy = "" if days >= MIN_DAYS else f"renew {where}"
    return Finding(what, f"{found}; until {not_after}, {days:.0f} days", remedy)


def _clock(off_s: float, of: str) -> Finding:
    remedy = "" if abs(off_s) < MAX_CLOCK_OFF_S else "set both clocks (NTP: chrony or systemd-timesyncd)"
    return Finding("clock here", f"within {max(abs(off_s), 0.1):.1f} s of that of {of}", remedy)


def unreachable(host: str, port: int) -> str:
    """Why no TCP connection can be made; empty: it can."""
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
