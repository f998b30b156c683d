"""Set-up of a Postgres with a role per service: least privilege on read models and on the embedded log.

    PENSTOCK_DSN_FILE=admin.url python -m penstock.local.postgres_setup --rights infra/kafka/acls.yaml --urls
    FOLDER
        [--cells N] [--node NODE …]

Run it as the server's administrator, before the services of a new version start, and again at any time.
`FOLDER/SERVICE.url` (mode
0600) is for the service's `PENSTOCK_DSN_FILE`, and `FOLDER/nodes/NODE.url` for the `PENSTOCK_LOG_FILE` of
      that node's reporter. Passwords are made once and stay.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import asyncpg
import msgspec
import typer

from penstock import commandline
from penstock.errors import ConfigurationError, StoreError
from penstock.log.kafka_setup import MAX_CELLS, read_rights
from penstock.log.postgres.embedded_roles import NODE_REPORTER, grant_log, grant_node, node_role, role_of
from penstock.log.topic_settings import Rights
from penstock.model.nouns.types import Identifier
from penstock.runtime.database.database_roles import CONNECT_TIMEOUT_S, ensure_role, password_of, url_for
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.store import estimator_schema
from penstock_services.gateway.shell.store import gateway_schema

SERVICE_NAME = re.compile(r"[a-z][a-z-]{0,40}")
READERS = ("batcher", "contention-guard", "estimator", "gateway", "migrator", "placer")
"""Services that may read the read models and snapshots.
All of them read the ledger, from which these are computed."""


def schemas(cell: str) -> dict[str, str]:
    """Service → the schema that it owns, migrates and alone writes."""
    return {
        "projector": schema_of(cell),
        "gateway": gateway_schema(cell),
        "estimator": estimator_schema(cell),
    }


async def give_schema(connection: asyncpg.Connection, schema: str, owner: str) -> None:
    """Makes this role the owner of the schema and its tables; no other service has rights there."""
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    await connection.execute(f"ALTER SCHEMA {schema} OWNER TO {owner}")
    for row in await connection.fetch(
        "SELECT quote_ident(tablename) AS name FROM pg_tables WHERE schemaname = $1", schema
    ):
        await connection.execute(f"ALTER TABLE {schema}.{row['name']} OWNER TO {owner}")


async def let_read(connection: asyncpg.Connection, schema: str, owner: str, reader: str) -> None:
    """Lets `reader` read every table of the schema, future tables included."""
    await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {reader}")
    await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {reader}")
    await connection.execute(
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT SELECT ON TABLES TO {reader}"
    )


async def prepare(
    settings: Settings, rights: Rights, folder: Path, cells: int = 1, nodes: Sequence[str] = ()
) -> list[str]:
    """Makes roles, files and rights for the cell of `settings`, and for the reporters of these nodes; returns
    a line for each.

    The embedded log gets its rights where it is the same database. Raises `ConfigurationError`, `StoreError`.
    """
    dsn = settings.need_dsn("the set-up")
    owned = schemas(settings.cell)
    with_log = settings.log_url == dsn
    services = sorted({*owned, *READERS, *(rights if with_log else ())})
    for service in services:
        if not SERVICE_NAME.fullmatch(service):
            raise ConfigurationError(f"--rights: {service!r} is not a service; use small letters and -")
    if nodes and (not with_log or NODE_REPORTER not in rights):
        raise ConfigurationError(f"--node: needs the log in this database, and {NODE_REPORTER} in --rights")
    roles = {service: role_of(service) for service in services}
    roles |= {f"nodes/{quote(node_id, safe='')}": node_role(_checked(node_id)) for node_id in nodes}
    urls = {name: url_for(dsn, role, _password(folder, name)) for name, role in roles.items()}
    _write_private(folder, urls)
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
        try:
            async with connection.transaction():
                for name, role in roles.items():
                    await ensure_role(connection, role, password_of(urls[name]))
                for service, schema in owned.items():
                    await give_schema(connection, schema, role_of(service))
                for reader in READERS:
                    await let_read(connection, owned["projector"], role_of("projector"), role_of(reader))
                if with_log:
                    await grant_log(connection, rights, cells)
                for node_id in nodes:
                    await grant_node(connection, node_id, rights)
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(
            f"the set-up failed, nothing was changed: {error}; PENSTOCK_DSN must be a superuser's"
        ) from error
    return [
        f"schemas: {', '.join(f'{schema} ({service})' for service, schema in owned.items())}",
        f"log: {'rights by topic for ' + ', '.join(sorted(rights)) if with_log else 'elsewhere'}",
        f"{folder}: {', '.join(f'{name}.url' for name in roles)}",
    ]


def _checked(node_id: str) -> str:
    try:
        return msgspec.convert(node_id, Identifier)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"--node {node_id!r}: {error}") from error


def _password(folder: Path, name: str) -> str:
    """The password in the existing file, else a new one."""
    path = folder / f"{name}.url"
    known = password_of(path.read_text().strip()) if path.exists() else ""
    return known or secrets.token_urlsafe(24)


def _write_private(folder: Path, urls: Mapping[str, str]) -> None:
    """A file for each service and node, whole or not at all; only its owner may read it."""
    for name, url in urls.items():
        new = folder / f"{name}.new"
        try:
            new.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--urls: {new.parent} cannot be made: {error.strerror}; give a folder of your own"
            ) from error
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(url + "\n")
        new.replace(folder / f"{name}.url")


app = commandline.new_app()


@app.command()
def prepare_postgres(
    urls: Annotated[Path, typer.Option(help="Folder for the URL of each service, with its password.")],
    rights: Annotated[Path, typer.Option(help="infra/kafka/acls.yaml: rights on the embedded log.")],
    cells: Annotated[
        int, typer.Option(min=1, max=MAX_CELLS, help="Scheduling domains: partitions of the cell topics.")
    ] = 1,
    node: Annotated[
        list[str] | None,
        typer.Option(help="A node whose reporter gets a role of its own; once for each node."),
    ] = None,
) -> None:
    """Prepare a Postgres for services with a role each. May be run again at any time.

    PENSTOCK_DSN or PENSTOCK_DSN_FILE must be a superuser's.
    """
    print("\n".join(asyncio.run(prepare(Settings.from_env(), read_rights(rights), urls, cells, node or ()))))


if __name__ == "__main__":
    commandline.start(app, "python -m penstock.local.postgres_setup")
