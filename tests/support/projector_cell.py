"""A projector in this process on the embedded log, and what its tables hold against a replay of the ledger."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import numpy as np
import pytest
import pytest_asyncio

from penstock.log.embedded import EmbeddedLog
from penstock.log.port import Log, Partition
from penstock.model.topics import Topic
from penstock.runtime.settings import Settings
from penstock_services.projector.shell import service
from penstock_services.projector.shell.rebuild import verify
from tests.support.hand_placer import HandPlacer, node_spec

WITHIN_S = 120.0
LEDGER = Partition(Topic.LEDGER, 0)


@pytest_asyncio.fixture
async def log(dsn: str) -> AsyncIterator[EmbeddedLog]:
    found = await EmbeddedLog(dsn, "test").start()
    await found.create({Topic.LEDGER.value: 1})
    yield found
    await found.close()


@pytest.fixture
def cell(dsn: str) -> Settings:
    return Settings(log_url=dsn, dsn=dsn)


def busy(steps: int = 80, seed: int = 1) -> HandPlacer:
    placer = HandPlacer()
    placer.join(node_spec("n0", 4), node_spec("n1", 2))
    placer.wander(np.random.default_rng(seed), steps)
    return placer


async def reached(dsn: str, seq: int, schema: str = "penstock") -> None:
    """Waits until the tables hold record `seq`."""
    connection = await asyncpg.connect(dsn)
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    found = await connection.fetchval(f"SELECT seq FROM {schema}.positions")
                except asyncpg.UndefinedTableError:
                    found = None
                if found is not None and found >= seq:
                    assert found == seq
                    return
                await asyncio.sleep(0.01)
    finally:
        await connection.close()


@asynccontextmanager
async def projecting(settings: Settings, log: Log) -> AsyncIterator["asyncio.Task[None]"]:
    """A projector inside the block; its failure fails the test."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(service.run(settings, stop, log=log, ready=ready))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    assert ready.is_set()
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, WITHIN_S)


async def assert_equals_replay(settings: Settings, log: Log) -> None:
    found = await verify(settings, log)
    assert found["ok"], found["differences"]
    assert found["tables"]["jobs"] > 0
