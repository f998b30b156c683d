"""A role per service in Postgres: a stolen password does what that service may do, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from infra.devservers.kafka import ACLS, acl_table
from penstock.errors import NotAllowed
from penstock.local.postgres_setup import prepare
from penstock.local.services import NAMES, entry
from penstock.log.embedded import EmbeddedLog
from penstock.log.embedded_roles import EXPIRES, NODE_REPORTER, NODE_REPORTER_RIGHTS
from penstock.log.kafka_setup import read_rights
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import DAY_MS, FOR_EVER, RETENTION_MS
from penstock.model.topics import Topic
from penstock.runtime.settings import Settings

pytestmark = pytest.mark.postgres

SERVICES = tuple(acl_table())
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
    first = {path.stem: path.read_text() for path in folder.iterdir()}
    await prepare(settings, read_rights(ACLS), folder, 2)
    assert {path.stem: path.read_text() for path in folder.iterdir()} == first, "passwords stay"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    yield {service: url.strip() for service, url in first.items()}
    admin = await asyncpg.connect(dsn)
    for service in first:
        role = f"penstock_{service.replace('-', '_')}"
        await admin.execute(f"DROP OWNED BY {role} CASCADE")
        await admin.execute(f"DROP ROLE {role}")
    await admin.close()


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


async def refused(connection: asyncpg.Connection, statement: str) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(statement)
    except asyncpg.InsufficientPrivilegeError:
        return True
    return False


async def rows_of(connection: asyncpg.Connection) -> set[str]:
    """Topics of which the connection sees records."""
    query = "SELECT DISTINCT p.topic FROM penstock_log.records r JOIN penstock_log.partitions p ON p.id = r.partition_id"
    return {row["topic"] for row in await connection.fetch(query)}


async def test_each_role_may_do_its_own_work_and_no_other(dsn: str, urls: dict[str, str]) -> None:
    """A job reads a log URL from its machine and tries to give itself GPUs: table of all services and topics."""
    table = acl_table()
    assert {who: dict(table[who]) for who in NODE_REPORTER_RIGHTS} == NODE_REPORTER_RIGHTS, (
        "one fact, in two places"
    )
    assert set(urls) == set(SERVICES)
    log = await EmbeddedLog(dsn, "administrator").start()
    await log.append([Message(Partition(topic, 0), b"old") for topic in Topic])
    await log.close()
    for service, url in urls.items():
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


async def test_the_placer_deletes_what_has_expired_and_nothing_else(dsn: str, urls: dict[str, str]) -> None:
    """The embedded log's orders and dead letters must not fill the disk; the ledger stays, also for a thief of the placer's password."""
    admin = await EmbeddedLog(dsn, "administrator").start()
    await admin.append([Message(Partition(topic, 0), b"old") for topic in Topic])
    owner = await asyncpg.connect(dsn)
    await owner.execute("UPDATE penstock_log.records SET timestamp_ms = timestamp_ms - $1", 100 * DAY_MS)
    await admin.append([Message(Partition(topic, 0), b"new") for topic in Topic])
    others = await EmbeddedLog(urls[NODE_REPORTER], NODE_REPORTER).start()
    assert others._expiring is not None
    await others._expiring
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


async def test_the_services_work_with_their_roles(
    dsn: str, urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each service has its own URL and no other: the ledger gets its first record, and that reaches the read models."""
    monkeypatch.setenv("PENSTOCK_GATEWAY_BIND", "127.0.0.1:0")
    stop, ready = asyncio.Event(), {name: asyncio.Event() for name in NAMES}
    tasks = [
        asyncio.create_task(
            entry(name)(Settings(log_url=urls[name], dsn=urls[name]), stop, ready=ready[name]), name=name
        )
        for name in NAMES
    ]
    everybody = asyncio.gather(*(event.wait() for event in ready.values()))
    await asyncio.wait([everybody, *tasks], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert everybody.done(), [task.get_name() for task in tasks if task.done()]
    gateway = await asyncpg.connect(urls["gateway"])
    async with asyncio.timeout(10):
        while not await gateway.fetchval("SELECT seq FROM penstock.positions"):
            await asyncio.sleep(0.02)
    for schema, statement in (
        ("penstock", "UPDATE penstock.positions SET seq = 0"),
        ("penstock", "DELETE FROM penstock.snapshots"),
        ("penstock_learned", "SELECT * FROM penstock_learned.runs"),
    ):
        assert await refused(gateway, statement), schema
    await gateway.close()
    node = await asyncpg.connect(urls[NODE_REPORTER])
    for table in ("penstock.jobs", "penstock_gateway.idempotency", "penstock_learned.runs"):
        assert await refused(node, f"SELECT * FROM {table}"), table
    await node.close()
    stop.set()
    await asyncio.gather(*tasks)
