"""A node's report of its joining must be true when it is read, however often it is repeated."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.log.port import Message
from penstock.model.decisions.orders import Order
from penstock.model.inputs import external_events
from penstock.model.nouns.token import token_of
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock_services.node_reporter.shell import node as node_module
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.records import read_record
from penstock_services.node_reporter.shell.run import runner
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.node_cell import TOPICS, Cell, node_options, start_order, stop_order, working


async def test_a_repeated_join_never_denies_a_task_that_has_started(tmp_path: Path) -> None:
    """The log takes what the node reports, but its answers get lost; the reporter is restarted meanwhile,
    twice.

    A NodeJoined that is heard again after a task has started, and does not list it, declares it dead: it
    would be placed once more while it runs.
    """
    options = node_options(tmp_path)
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(external_events.NodeJoined)
    go = tmp_path / "go"
    await cell.order(start_order(7, "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done"))
    for _ in range(6):  # more than the first life after it sees
        broker.fail_next_append(after_write=True)
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(
            external_events.NodeJoined, count=4
        )  # by now the order was read, if it was not held back
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(external_events.TaskStarted)
        go.touch()
        await cell.until(external_events.TaskExited)
    started: set[str] = set()
    for event in cell.events():
        if isinstance(event, external_events.TaskStarted):
            started.add(event.task_id)
        if isinstance(event, external_events.NodeJoined):
            assert started <= {task.task_id for task in event.tasks}


@pytest.mark.parametrize("content", [b"", b'{"task_id": "j', b"\xff\x00"])
def test_a_file_that_the_disk_lost_was_never_written(tmp_path: Path, content: bytes) -> None:
    """Power fails after the rename and before the data: ext4 then shows an empty file. The node must still
    come up."""
    path = tmp_path / "started.json"
    path.write_bytes(content)
    assert read_record(path, Started) is None
    found = Started("t", 1, shim=2, shim_start=3, pid=4, started_ms=5)
    path.write_text(json.dumps(msgspec.structs.asdict(found) | {"pid_start": 6}))
    assert read_record(path, Started) == found


async def test_a_restart_waits_for_a_predecessor_that_is_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything on a machine is killed but its node-reporter, which is asked to leave and has no log to
    report it to.

    The next one is started at once: it must wait, and take over what the first could not say.
    """
    monkeypatch.setattr(node_module, "LEAVE_TIMEOUT_S", 3.0)  # in which the next one has to wait
    options = node_options(tmp_path, drain=True)
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    dead = MemoryLog(broker, "node-reporter")
    stop = asyncio.Event()
    first = asyncio.ensure_future(runner(options)(Settings(log_url="memory"), stop, log=dead))
    await cell.until(external_events.NodeJoined)
    await dead.close()
    stop.set()
    async with working(replace(options, drain=False), MemoryLog(broker, "node-reporter")):
        await cell.until(external_events.NodeJoined, count=2)
    await first
    kinds = [type(event).__name__ for event in cell.events()]
    assert kinds == ["NodeJoined", "NodeLeft", "NodeJoined"]


async def test_what_was_ordered_before_a_goodbye_is_not_obeyed_after_it(tmp_path: Path) -> None:
    """The placer orders a start while the node drains; then it reads the goodbye and places the job
    elsewhere.

    The node's next reporter, on the same boot, finds the order in its partition: it must leave it alone.
    """
    options = node_options(tmp_path, drain=True)
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, MemoryLog(broker, "node-reporter")):
        known = (await cell.until(external_events.NodeJoined)).incarnation
    await cell.until(external_events.NodeLeft)
    await cell.order(start_order(7, "sleep", "600", incarnation=known))
    async with working(replace(options, drain=False), MemoryLog(broker, "node-reporter")):
        now = (await cell.until(external_events.NodeJoined, count=2)).incarnation
        await cell.order(start_order(8, "true", gpus=(1,), incarnation=now))
        await cell.until(external_events.TaskExited)
    assert [event.token for event in cell.events(external_events.TaskStarted)] == [8]


class Answering(MemoryLog):
    """A log whose placer answers the joining before the reporter has it acknowledged."""

    def __init__(self, broker: MemoryBroker, placer: Cell, *answers: Order) -> None:
        super().__init__(broker, "node-reporter")
        self._placer = placer
        self._answers = answers

    async def append(self, messages: Sequence[Message]) -> list[int]:
        offsets = await super().append(messages)
        events = [from_wire(message.headers, message.value).data for message in messages]
        if any(isinstance(event, external_events.NodeJoined) for event in events):
            answers, self._answers = self._answers, ()
            await self._placer.order(*answers)
        return offsets


async def test_orders_of_a_log_that_is_younger_than_the_journal_are_all_read(tmp_path: Path) -> None:
    """The log was lost, and its orders begin anew, while the node's journal stands behind some of the old
    ones. The new placer answers the joining with as many orders as those before the reporter has begun to
    read: none of them may be skipped."""
    options = node_options(tmp_path)
    lost = MemoryBroker()
    lost.create(TOPICS)
    cell = Cell(MemoryLog(lost, "placer"))
    async with working(options, MemoryLog(lost, "node-reporter")):
        await cell.until(external_events.NodeJoined)
        await cell.order(start_order(7, "true"), stop_order(8, "unknown"))
        await cell.until(external_events.TaskExited)
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    answers = (start_order(token_of(1, 9), "true"), stop_order(token_of(1, 10), "unknown"))
    async with working(options, Answering(broker, cell, *answers)):
        await cell.until(external_events.NodeJoined)
        await cell.order(start_order(token_of(1, 11), "true", gpus=(1,)))
        for token in (11, 9):
            await cell.until(external_events.TaskExited, task_id=start_order(token_of(1, token)).task_id)
