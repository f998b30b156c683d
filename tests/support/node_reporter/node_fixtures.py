"""Fixtures of tests of the node-reporter; a test module binds those it uses: `node = node_fixtures.node`."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.log.postgres.embedded import EmbeddedLog
from penstock_services.node_reporter.options import Options
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.node_cell import TOPICS, Cell, end_tasks, node_options, story, working
from tests.support.story import told


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return node_options(tmp_path)


@pytest.fixture
def in_background() -> Iterator[None]:
    """As a script starts it with `&`: the shell has keys for signals ignored, and children inherit that."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryBroker()
    broker.create(TOPICS)
    return broker


@pytest.fixture
async def cell(broker: MemoryBroker) -> Cell:
    return Cell(MemoryLog(broker, "placer"))


@pytest.fixture
async def embedded_cell(dsn: str) -> AsyncIterator[Cell]:
    """One on the embedded log, for a node-reporter in a process of its own."""
    log = await EmbeddedLog(dsn, "placer").start()
    await log.create(TOPICS)
    cell = Cell(log)
    yield cell
    await cell.close()
    await log.close()


@pytest.fixture
async def node(options: Options, broker: MemoryBroker) -> AsyncIterator[Options]:
    """A node-reporter in this process."""
    async with working(options, MemoryLog(broker, "node-reporter")):
        yield options


@pytest.fixture(autouse=True)
def nothing_left(options: Options) -> Iterator[None]:
    """Whatever a test starts must not outlive it, even if the test fails. Its failure tells what the node has
    reported."""
    with told("the node's last events, and its tasks' output", lambda: story(options)):
        yield
    end_tasks(options)
