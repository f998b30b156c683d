"""A projector in this process on the embedded log, and what its tables hold against a replay of the
ledger."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import numpy as np
import pytest
import pytest_asyncio

from penstock.log.port import Log, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.schema.topics import Topic
from penstock.runtime.settings import Settings
from penstock_services.projector.shell import service
from penstock_services.projector.shell.rebuild import verify
from tests.support.cluster.hand_placer import STORY_RECORDS, HandPlacer, in_a_line, node_spec
from tests.support.installation.services import beside
from tests.support.story import told
from tests.support.waiting import await_until

LEDGER = Partition(Topic.LEDGER, 0)


@pytest_asyncio.fixture
async def log(dsn: str) -> AsyncIterator[EmbeddedLog]:
    found = await EmbeddedLog(dsn, "test").start()
    await found.create({Topic.LEDGER.value: 1})
    with told("the ledger's last records, and where the tables are", lambda: story(dsn)):
        yield found
    await found.close()


def story(dsn: str) -> str:
    """In a thread, which has no event loop yet."""
    found: list[str] = []
    work = threading.Thread(target=lambda: found.append(asyncio.run(_story(dsn))))
    work.start()
    work.join()
    return "".join(found)


async def _story(dsn: str) -> str:
    connection = await asyncpg.connect(dsn)
    try:
        records = await connection.fetch(
            "SELECT r.value FROM penstock_log.records r JOIN penstock_log.partitions p ON p.id = "
            "r.partition_id WHERE p.topic = $1 AND p.index = 0 ORDER BY r.position DESC LIMIT $2",
            Topic.LEDGER.value,
            STORY_RECORDS,
        )
        lines = [in_a_line(row["value"]) for row in reversed(records)]
        return "\n".join([*lines, f"tables: at record {await _projected(connection, 'penstock')}"])
    finally:
        await connection.close()


async def _projected(connection: asyncpg.Connection, schema: str) -> int:
    """The record up to which the tables hold the ledger; -1: there are no tables."""
    try:
        return int(await connection.fetchval(f"SELECT seq FROM {schema}.positions") or 0)
    except asyncpg.UndefinedTableError:
        return -1


@pytest.fixture
def cell(dsn: str) -> Settings:
    return Settings(log_url=dsn, dsn=dsn)


def busy(steps: int = 80, seed: int = 1) -> HandPlacer:
    placer = HandPlacer()
    placer.join(node_spec("n0", 4), node_spec("n1", 2))
    placer.wander(np.random.default_rng(seed), steps)
    return placer


async def reached(dsn: str, seq: int, schema: str = "penstock") -> None:
    """Waits until the tables hold record `seq`, the ledger's last one."""
    connection, found = await asyncpg.connect(dsn), -1

    async def at() -> int:
        nonlocal found
        found = await _projected(connection, schema)
        return found if found >= seq else 0

    try:
        last: int = await await_until(
            at, lambda: f"record {seq} in the tables of {schema}: they are at {found}"
        )
        assert last == seq
    finally:
        await connection.close()


@asynccontextmanager
async def projecting(settings: Settings, log: Log) -> AsyncIterator["asyncio.Task[None]"]:
    """A projector inside the block; its failure fails the test."""
    stop, ready = asyncio.Event(), asyncio.Event()
    async with beside(service.run(settings, stop, log=log, ready=ready), stop, ready) as task:
        yield task


async def assert_equals_replay(settings: Settings, log: Log) -> None:
    found = await verify(settings, log)
    assert found["ok"], found["differences"]
    assert found["tables"]["jobs"] > 0
