"""What a node says about itself when it joins must be true when it is heard, however often it is repeated."""

import json
from pathlib import Path

import pytest

from penstock.events import doors
from penstock.kernel.memory_log import MemoryBroker, MemoryLog
from penstock.node_reporter.options import Options
from penstock.node_reporter.shell.spawner import read_json
from penstock.testing.node_cell import NODE, TOPICS, Cell, start_order, working


async def test_a_repeated_join_never_denies_a_task_that_has_started(tmp_path: Path) -> None:
    """The log takes what the node says, but its answers get lost; the reporter is restarted meanwhile, twice.

    A NodeJoined that is heard again after a task has started, and does not list it, declares it dead: it would be
    placed once more while it runs.
    """
    options = Options(
        NODE, tmp_path / "state", tmp_path / "logs", virtual_gpus=2, cores=4, host_memory_mib=8_192
    )
    broker = MemoryBroker()
    broker.create(TOPICS)
    cell = Cell(MemoryLog(broker, "placer"))
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(doors.NodeJoined)
    await cell.order(start_order(7, "sleep", "2"))
    for _ in range(6):  # more than the first life after it sees
        broker.fail_next_append(after_write=True)
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(doors.NodeJoined, count=4)  # by now the order was read, if it was not held back
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(doors.TaskExited)
    started: set[str] = set()
    for event in cell.events():
        if isinstance(event, doors.TaskStarted):
            started.add(event.task_id)
        if isinstance(event, doors.NodeJoined):
            assert started <= {task.task_id for task in event.tasks}


@pytest.mark.parametrize("content", [b"", b'{"task_id": "j', b"\xff\x00"])
def test_a_file_that_the_disk_lost_was_never_written(tmp_path: Path, content: bytes) -> None:
    """Power fails after the rename and before the data: ext4 then shows an empty file. The node must still come up."""
    path = tmp_path / "started.json"
    path.write_bytes(content)
    assert read_json(path) is None
    path.write_text(json.dumps({"pid": 1}))
    assert read_json(path) == {"pid": 1}
