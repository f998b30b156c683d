"""A role per service in Postgres: a stolen password does what that service may do, and nothing else."""

import asyncio
import base64
import hmac
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from hashlib import pbkdf2_hmac, sha256
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from infra.devservers.build_cache import REPOSITORY
from infra.devservers.kafka import ACLS, acl_table
from penstock.cli.operations.doctor import Finding
from penstock.errors import ConfigurationError, NotAllowed
from penstock.local.doctor.reach import PROJECTOR_TABLES, database_findings
from penstock.local.postgres_setup import prepare
from penstock.local.services import NAMES, entry
from penstock.log.kafka_setup import read_rights
from penstock.log.port import Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.postgres.embedded_roles import (
    EXPIRES,
    NODE_REPORTER,
    NODE_REPORTER_RIGHTS,
    node_role,
    role_of,
)
from penstock.log.topic_settings import DAY_MS, FOR_EVER, RETENTION_MS
from penstock.model.schema.topics import Topic, node_partition
from penstock.runtime.database.database_roles import ensure_role
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock.runtime.keys.node_keys import OPERATOR_KEY
from penstock.runtime.settings import Settings
from tests.support.cli.tiltfile import SERVICE, service_environments, tilts_resources
from tests.support.gateway.canaries import found_in, new_canary
from tests.support.gateway.postgres_roles import drop_roles
from tests.support.installation.system import clean_environment, python_service
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

SERVICES = tuple(acl_table())
NODES = ("n1", "n10")  # of one partition of the orders
LIMITED = {topic for topic, ms in RETENTION_MS.items() if ms != FOR_EVER}
REFUSED = (
    "INSERT INTO penstock_log.records VALUES (1, 1000000, 0, NULL, '', '')",
    "UPDATE penstock_log.records SET value = ''",
    "UPDATE penstock_log.partitions SET head = 0",
    "DELETE FROM penstock_log.partitions",
    "TRUNCATE penstock_log.records",
    "INSERT INTO penstock_log.rights VALUES (current_user, 'write', 'penstock.ledger.v1')",
    "ALTER TABLE penstock_log.records DISABLE ROW LEVEL SECURITY",
    "CREATE TABLE penstock_log.mine (x int)",
    "CREATE SCHEMA mine",
    "CREATE ROLE mine SUPERUSER",
    "SET ROLE penstock",
    "COPY (SELECT 1) TO PROGRAM 'true'",
    "SELECT pg_read_file('postgresql.conf')",
)
"""What no service may do, in SQL."""


@pytest_asyncio.fixture
async def urls(dsn: str, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Service → its URL, on a database that the set-up has prepared twice."""
    folder = tmp_path / "urls"
    settings = Settings(log_url=dsn, dsn=dsn)
    await prepare(settings, read_rights(ACLS), folder)
    first = {path.stem: path.read_text().strip() for path in folder.iterdir()}
    await prepare(settings, read_rights(ACLS), folder, 2, NODES)
    files = {str(path.relative_to(folder)).removesuffix(".url"): path for path in folder.rglob("*.url")}
    found = {name: path.read_text().strip() for name, path in files.items()}
    assert first.items() <= found.items(), "passwords stay"
    assert set(found) - set(first) == {f"nodes/{node}" for node in NODES}
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    yield found
    await drop_roles(dsn, found.values())


@pytest_asyncio.fixture
async def roles(dsn: str, tmp_path: Path) -> AsyncIterator[Path]:
    """What `make roles` makes, in a folder of its own."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.ready").touch()
    folder = tmp_path / "roles"
    argv = [
        "make",
        "roles",
        f"VENV={tmp_path}/venv",
        f"BIN={Path(sys.executable).parent}",
        f"ROLES={folder}",
        f"ADMINISTRATOR={dsn}",
    ]
    env = clean_environment(PENSTOCK_LOG="kafka://127.0.0.1:1")
    done = await asyncio.to_thread(
        subprocess.run, argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yield folder
    await drop_roles(dsn, [path.read_text().strip() for path in folder.rglob("*.url")])


def modes_of(folder: Path) -> set[int]:
    """Of all files in it."""
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


async def appended(url: str, topic: str) -> bool:
    """Whether the holder of this URL gets a record into the topic."""
    log = await EmbeddedLog(url, "thief").start()
    try:
        await log.append([Message(Partition(topic, 0), b"x")])
    except NotAllowed:
        return False
    finally:
        await log.close()
    return True


async def records_of(log: EmbeddedLog, place: Partition, count: int) -> list[tuple[object, ...]]:
    """(offset, key, value, headers) of the partition's first records, as its readers see them."""
    reader = log.reader({place: 0})
    found: list[tuple[object, ...]] = []
    while len(found) < count:
        found += [(each.offset, each.key, each.value, each.headers) for each in await reader.read()]
    await reader.close()
    return found


async def refused(connection: asyncpg.Connection, statement: str) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(statement)
    except asyncpg.InsufficientPrivilegeError:
        return True
    return False


async def rows_of(connection: asyncpg.Connection) -> set[str]:
    """Topics of which the connection sees records."""
    query = (
        "SELECT DISTINCT p.topic FROM penstock_log.records r JOIN penstock_log.partitions p ON p.id = "
        "r.partition_id"
    )
    return {row["topic"] for row in await connection.fetch(query)}


async def test_each_role_may_do_its_own_work_and_no_other(dsn: str, urls: dict[str, str]) -> None:
    """A job reads a log URL from its machine and tries to give itself GPUs: table of all services and
    topics."""
    table = acl_table()
    assert {who: dict(table[who]) for who in NODE_REPORTER_RIGHTS} == NODE_REPORTER_RIGHTS, (
        "one fact, in two places"
    )
    assert set(urls) == {*SERVICES, *(f"nodes/{node}" for node in NODES)}
    log = await EmbeddedLog(dsn, "administrator").start()
    await log.append([Message(Partition(topic, 0), b"old") for topic in Topic])
    await log.close()
    for service in SERVICES:
        url = urls[service]
        may = {str(topic) for topic in Topic if await appended(url, topic)}
        assert may == set(table[service]["write"]), service
        connection = await asyncpg.connect(url)
        expires = LIMITED if service == EXPIRES else set()
        assert await rows_of(connection) == set(table[service]["read"]) | expires, service
        done = [statement for statement in REFUSED if not await refused(connection, statement)]
        assert done == [], service
        if service != EXPIRES:
            assert await refused(connection, "DELETE FROM penstock_log.records"), service
        await connection.close()


async def test_the_doctor_compares_the_read_models_with_this_version(dsn: str, urls: dict[str, str]) -> None:
    """Before the projector's first start; after an upgrade that it has not seen; when a newer one was at
    work."""

    async def found(service: str) -> Finding:
        findings = await asyncio.to_thread(lambda: list(database_findings(urls[service], "default")))
        return next(finding for finding in findings if finding.what == "read models")

    assert "start the projector" in (await found("gateway")).remedy
    files = load_migrations(PROJECTOR_TABLES)
    projector = await asyncpg.connect(urls["projector"])
    await migrate(projector, schema_of("default"), files[:-1])
    older = await found("gateway")
    assert f"{files[-1].name} not applied" in older.found
    assert "restart the projector" in older.remedy
    await migrate(projector, schema_of("default"), files)
    for service in NAMES:
        assert await found(service) == Finding(
            "read models", f"penstock is at {files[-1].name[:-4]}, as in this version"
        )
    await projector.execute("INSERT INTO penstock.migrations (name, sha256) VALUES ('9999_later.sql', '')")
    newer = await found("gateway")
    assert "9999_later.sql" in newer.found
    assert "a newer one" in newer.remedy
    await projector.close()


async def test_a_right_that_is_withdrawn_is_gone(dsn: str, urls: dict[str, str], tmp_path: Path) -> None:
    """An administrator shrinks the table of rights, or somebody gave a role more by hand: the next set-up
    ends it."""
    admin = await asyncpg.connect(dsn)
    await admin.execute("ALTER ROLE penstock_gateway SUPERUSER CREATEROLE BYPASSRLS")
    await admin.execute("GRANT INSERT, UPDATE ON penstock_log.records TO penstock_estimator")
    table = {
        service: {verb: list(names) for verb, names in verbs.items()}
        for service, verbs in read_rights(ACLS).items()
    }
    table["gateway"]["write"].remove(Topic.NODES)
    table["estimator"]["read"].remove(Topic.JOBS)
    table[NODE_REPORTER]["write"].remove(Topic.TELEMETRY)
    await prepare(Settings(log_url=dsn, dsn=dsn), table, tmp_path / "urls", 2, NODES)
    for who, topic in (
        ("gateway", Topic.NODES),
        ("estimator", Topic.LEDGER),
        (f"nodes/{NODES[0]}", Topic.TELEMETRY),
    ):
        assert not await appended(urls[who], topic), who
    log = await EmbeddedLog(dsn, "administrator").start()
    await log.append([Message(Partition(topic, 0), b"x") for topic in Topic])
    await log.close()
    estimator = await asyncpg.connect(urls["estimator"])
    assert await rows_of(estimator) == set(table["estimator"]["read"])
    assert [
        each["topic"]
        for each in await estimator.fetch("SELECT topic FROM penstock_log.rights WHERE role <> current_user")
    ] == []
    for connection in (estimator, admin):
        await connection.close()


async def test_no_password_is_in_a_statement(dsn: str) -> None:
    """Statements go to the server's log and to pg_stat_activity."""
    admin, statements = await asyncpg.connect(dsn), []
    admin.add_query_logger(lambda record: statements.append(record.query))
    canary = new_canary()
    await ensure_role(admin, "penstock_watched", canary)
    assert len(statements) >= 3
    assert found_in("\n".join(statements).encode(), [canary]) == []
    stored = await admin.fetchval("SELECT rolpassword FROM pg_authid WHERE rolname = 'penstock_watched'")
    _, rounds_and_salt, keys = stored.split("$")
    rounds, salt = rounds_and_salt.split(":")
    salted = pbkdf2_hmac("sha256", canary.encode(), base64.b64decode(salt), int(rounds))
    stored_key = sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    assert keys.split(":")[0] == base64.b64encode(stored_key).decode(), "with which it may log in"
    await admin.execute("DROP OWNED BY penstock_watched; DROP ROLE penstock_watched")
    await admin.close()


async def test_a_node_reads_the_orders_for_itself_alone(dsn: str, urls: dict[str, str]) -> None:
    """Two nodes share a partition of the orders: a job that reads the log's URL on n1 learns nothing of n2's
    commands."""
    place = Partition(Topic.ORDERS, node_partition(NODES[0]))
    assert {node_partition(node) for node in NODES} == {place.index}
    log = await EmbeddedLog(dsn, "administrator").start()
    for number, node in enumerate((*NODES, *NODES)):
        await log.append([Message(place, f"{node} runs {number}".encode(), (("h", b"1"),), node.encode())])
    everything = await records_of(log, place, 4)
    await log.close()
    for node in NODES:
        mine = await EmbeddedLog(urls[f"nodes/{node}"], node).start()
        assert await records_of(mine, place, 4) == [
            (offset, key, value, headers) if key == node.encode() else (offset, b"", b"", ())
            for offset, key, value, headers in everything
        ]
        with pytest.raises(NotAllowed, match="may not append"):
            await mine.append([Message(place, b"forged", key=b"other")])
        await mine.close()
        thief = await asyncpg.connect(urls[f"nodes/{node}"])
        query = "SELECT position FROM penstock_log.records"
        assert len(await thief.fetch(query)) == 4, "positions show no content"
        for column in ("key", "headers", "value", "*"):
            assert await refused(thief, f"SELECT {column} FROM penstock_log.records"), column
        assert await refused(thief, "DELETE FROM penstock_log.records")
        assert len(await thief.fetch("SELECT DISTINCT role FROM penstock_log.rights")) == 1
        done = [statement for statement in REFUSED if not await refused(thief, statement)]
        assert done == [], node
        await thief.close()
    assert await appended(urls[f"nodes/{NODES[0]}"], Topic.NODES)
    assert not await appended(urls[f"nodes/{NODES[0]}"], Topic.ORDERS)


async def test_nodes_of_any_name_have_roles_of_their_own(dsn: str, tmp_path: Path) -> None:
    names = ["n/1", "n_1", "N_1", "reporter", "x" * 128, "x" * 127]
    roles = {node_role(name) for name in names}
    assert len(roles) == len(names)
    assert all(re.fullmatch(r"penstock_node_[a-z0-9_]{1,49}", role) for role in roles)
    settings, rights = Settings(log_url=dsn, dsn=dsn), read_rights(ACLS)
    for wrong in ("", "n 1", 'n"; DROP'):
        with pytest.raises(ConfigurationError, match="--node"):
            await prepare(settings, rights, tmp_path, nodes=[wrong])
    with pytest.raises(ConfigurationError, match="--node: needs the log"):
        await prepare(Settings(log_url="kafka://127.0.0.1:1", dsn=dsn), rights, tmp_path, nodes=["n1"])
    assert os.listdir(tmp_path) == []


async def test_the_placer_deletes_what_has_expired_and_nothing_else(dsn: str, urls: dict[str, str]) -> None:
    """The embedded log's orders and dead letters must not fill the disk; the ledger stays, also for a thief
    of the placer's password."""
    admin = await EmbeddedLog(dsn, "administrator").start()
    assert admin._expiring is not None
    await admin._expiring  # its own look, which finds nothing yet
    await admin.append([Message(Partition(topic, 0), b"old") for topic in Topic])
    owner = await asyncpg.connect(dsn)
    await owner.execute("UPDATE penstock_log.records SET timestamp_ms = timestamp_ms - $1", 100 * DAY_MS)
    await admin.append([Message(Partition(topic, 0), b"new") for topic in Topic])
    others = await EmbeddedLog(urls[NODE_REPORTER], NODE_REPORTER).start()
    assert others._expiring is None  # it may not, and does not even look
    await others.close()
    assert await owner.fetchval("SELECT count(*) FROM penstock_log.records") == 2 * len(Topic)
    placer = await EmbeddedLog(urls[EXPIRES], EXPIRES).start()
    assert placer._expiring is not None
    await placer._expiring
    assert await owner.fetchval("SELECT count(*) FROM penstock_log.records") == 2 * len(Topic) - len(LIMITED)
    thief = await asyncpg.connect(urls[EXPIRES])
    assert await thief.execute("DELETE FROM penstock_log.records") == "DELETE 0"
    await thief.close()
    with pytest.raises(NotAllowed, match="administrator"):
        await placer.delete_before({Partition(Topic.LEDGER, 0): 1})
    for each in (placer, admin):
        await each.close()
    await owner.close()


async def test_the_services_of_the_tiltfile_work_with_their_roles(
    dsn: str, roles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each service and node has its own URL from `make roles`, and no other: the node's joining reaches
    ledger and read models."""
    assert modes_of(roles) == {0o600}
    environments = service_environments(roles)
    monkeypatch.setenv(OPERATOR_KEY, environments["gateway"][OPERATOR_KEY])
    monkeypatch.setenv("PENSTOCK_GATEWAY_BIND", "127.0.0.1:0")
    stop, ready = asyncio.Event(), {name: asyncio.Event() for name in NAMES}
    tasks = [
        asyncio.create_task(
            entry(name)(Settings.from_env(environments[name]), stop, ready=ready[name]), name=name
        )
        for name in NAMES
    ]
    everybody = asyncio.gather(*(event.wait() for event in ready.values()))
    await asyncio.wait([everybody, *tasks], return_when=asyncio.FIRST_COMPLETED)
    assert everybody.done(), [task.get_name() for task in tasks if task.done()]
    module, *arguments = tilts_resources()["node-0"]["serve_cmd"].removeprefix(SERVICE).split()
    arguments += ["--state-dir", f"{tmp_path}/node", "--log-dir", f"{tmp_path}/logs", "--allow-root"]
    env = clean_environment(**environments["node-0"])
    reporter = await asyncio.to_thread(
        python_service, module, arguments, log_path=tmp_path / "node.log", env=env
    )
    gateway = await asyncpg.connect((roles / "gateway.url").read_text().strip())

    async def joined() -> bool:
        assert all(reporter.running and not task.done() for task in tasks), (
            tmp_path / "node.log"
        ).read_text()
        return bool(await gateway.fetchval("SELECT status FROM penstock.nodes") == "ready")

    await await_until(joined, lambda: f"the node; its log: {(tmp_path / 'node.log').read_text()}")
    for schema, statement in (
        ("penstock", "UPDATE penstock.positions SET seq = 0"),
        ("penstock", "DELETE FROM penstock.snapshots"),
        ("penstock_learned", "SELECT * FROM penstock_learned.runs"),
    ):
        assert await refused(gateway, statement), schema
    await gateway.close()
    admin = await asyncpg.connect(dsn)
    query = (
        "SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
        "pg_backend_pid() "
    )
    query += "AND backend_type = 'client backend'"  # and no worker that happens to vacuum here
    assert {row["usename"] for row in await admin.fetch(query)} == {
        *map(role_of, NAMES),
        node_role("node-0"),
    }
    await admin.close()
    node = await asyncpg.connect((roles / "nodes/node-0.url").read_text().strip())
    for table in ("penstock.jobs", "penstock_gateway.idempotency", "penstock_learned.runs"):
        assert await refused(node, f"SELECT * FROM {table}"), table
    await node.close()
    await asyncio.to_thread(reporter.stop, 10)
    stop.set()
    await asyncio.gather(*tasks)
