"""Postgres roles for services and nodes, and URLs with their passwords."""

import base64
import hmac
import secrets
from collections.abc import Iterable
from hashlib import pbkdf2_hmac, sha256
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import asyncpg

from penstock.log.postgres.embedded_roles import NODE_REPORTER_RIGHTS, grant_log, grant_node, node_role

CONNECT_TIMEOUT_S = 5.0
SCRAM_ROUNDS = 4_096  # Postgres' own default; the passwords are random and long


def url_for(administrator: str, role: str, password: str) -> str:
    """The administrator's URL with this role and password: same server and database."""
    parts = urlsplit(administrator)
    address = parts.netloc.rpartition("@")[2]
    options = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("user", "password")]
    netloc = f"{role}:{quote(password, safe='')}@{address}"
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(options, safe="/")))


def scram_verifier(password: str) -> str:
    """SCRAM verifier that Postgres stores for a password (RFC 5803): the password itself is in no statement,
    nor in a server's log."""
    salt = secrets.token_bytes(16)
    salted = pbkdf2_hmac("sha256", password.encode(), salt, SCRAM_ROUNDS)
    stored = sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    salt64, stored64, server64 = (base64.b64encode(raw).decode() for raw in (salt, stored, server))
    return f"SCRAM-SHA-256${SCRAM_ROUNDS}:{salt64}${stored64}:{server64}"


async def ensure_role(connection: asyncpg.Connection, role: str, password: str) -> None:
    """Creates or alters the role: this password, and no right of an administrator."""
    known = await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", role)
    await connection.execute(
        f"{'ALTER' if known else 'CREATE'} ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE "
        "NOREPLICATION NOBYPASSRLS "
        f"PASSWORD '{scram_verifier(password)}'"
    )
    database = await connection.fetchval("SELECT quote_ident(current_database())")
    await connection.execute(f"GRANT CONNECT ON DATABASE {database} TO {role}")


async def node_urls(administrator: str, node_ids: Iterable[str]) -> dict[str, str]:
    """Node → a URL of the embedded log for its reporter, with a new password: the former one is void."""
    urls = {
        node_id: url_for(administrator, node_role(node_id), secrets.token_urlsafe(24)) for node_id in node_ids
    }
    connection = await asyncpg.connect(administrator, timeout=CONNECT_TIMEOUT_S)
    try:
        await grant_log(connection, {})
        for node_id, url in urls.items():
            await ensure_role(connection, node_role(node_id), password_of(url))
            await grant_node(connection, node_id, NODE_REPORTER_RIGHTS)
    finally:
        await connection.close()
    return urls


def password_of(url: str) -> str:
    return unquote(urlsplit(url).password or "")
