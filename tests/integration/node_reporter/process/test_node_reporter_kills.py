"""The node-reporter as a process, killed -9 wherever it hurts, over the embedded log; tasks and truth
survive."""

import asyncio
import resource
import signal
from pathlib import Path

import psutil
import pytest

from penstock.log.kafka.kafka import KafkaLog
from penstock.log.port import Partition
from penstock.model.inputs import external_events
from penstock.model.schema.topics import Topic
from penstock_services.node_reporter.options import Options
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    TOPICS,
    Cell,
    ours,
    printed,
    reporter_process,
    start_order,
    stop_order,
)
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

FAILPOINTS = [
    "node.order_read",
    "node.token_written",
    "node.folder_made",
    "node.task_spawned",
    "node.start_reported",
    "node.exit_noticed",
    "node.exit_reported",
]


options, nothing_left = node_fixtures.options, node_fixtures.nothing_left
cell = node_fixtures.embedded_cell


@pytest.mark.parametrize("failpoint", FAILPOINTS)
async def test_killed_anywhere_a_task_runs_once_and_its_code_arrives(
    failpoint: str, dsn: str, options: Options, cell: Cell, tmp_path: Path
) -> None:
    """The reporter dies at this place; its successor finds the rest. The judge is the task's own diary."""
    diary = tmp_path / "diary"
    script = f"echo began >> {diary}; sleep 0.4; exit 5"
    async with reporter_process(options, dsn, failpoint=f"{failpoint}:1") as victim:
        await cell.order(start_order(1, "sh", "-c", script))
        await victim.killed()
    async with reporter_process(options, dsn):
        exited = await cell.until(external_events.TaskExited)
        await cell.order(start_order(1, "sh", "-c", script), start_order(2, "true"))
        await cell.until(external_events.TaskExited, task_id="job-2.1.0")
    assert (exited.exit_code, exited.cause, exited.token) == (5, "exited", 1)
    assert diary.read_text().split() == ["began"]
    ids = cell.ids(external_events.TaskStarted), cell.ids(external_events.TaskExited)
    assert [len(found) for found in ids] == [2, 2], "one start and one exit for each of the two tasks"


async def test_the_token_is_on_disk_before_anything_follows_from_it(
    dsn: str, options: Options, cell: Cell
) -> None:
    """Killed right after the token was written, and an older order comes to the successor: refused. (Without
    the write the successor would know of no token and obey both orders.)"""
    async with reporter_process(options, dsn, failpoint="node.token_written:1") as victim:
        await cell.order(start_order(9, "sleep", "0.2"))
        await victim.killed()
    async with reporter_process(options, dsn):
        await cell.order(start_order(8))
        refused = await cell.until(external_events.OrderRefused)
        assert (refused.task_id, refused.highest_token) == ("job-8.1.0", 9)
        await cell.until(external_events.TaskExited, task_id="job-9.1.0")
    assert {event.task_id for event in cell.events(external_events.TaskStarted)} == {"job-9.1.0"}


async def test_a_tombstone_survives(dsn: str, options: Options, cell: Cell) -> None:
    """Ordered to make sure that a task never starts, then killed; the successor still refuses the start."""
    async with reporter_process(options, dsn, failpoint="node.token_written:1") as victim:
        await cell.order(stop_order(9, "job-8.1.0"))
        await victim.killed()
    async with reporter_process(options, dsn):
        await cell.order(start_order(8))
        assert (await cell.until(external_events.OrderRefused)).highest_token == 9
    assert cell.events(external_events.TaskStarted) == []
    assert len(cell.ids(external_events.TaskExited)) == 1


async def test_a_running_task_is_found_again_and_can_be_stopped(
    dsn: str, options: Options, cell: Cell
) -> None:
    """kill -9 while a task runs: the successor joins with it, hears its exit, stops it on request."""
    async with reporter_process(options, dsn) as victim:
        before = (await cell.next_join()).incarnation
        await cell.order(start_order(1, "sleep", "600"))
        started = await cell.until(external_events.TaskStarted)
        await victim.kill()
    assert psutil.pid_exists(started.pid)
    async with reporter_process(options, dsn):
        joined = await cell.next_join(before)
        assert [(task.task_id, task.token) for task in joined.tasks] == [("job-1.1.0", 1)]
        await cell.order(stop_order(2, "job-1.1.0"))
        exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.signal) == ("stopped", signal.SIGTERM)
    assert len(cell.ids(external_events.TaskStarted)) == 1


async def test_a_stop_that_was_under_way_is_finished(dsn: str, options: Options, cell: Cell) -> None:
    """Killed during the grace of a task that ignores SIGTERM: the successor keeps the deadline."""
    async with reporter_process(options, dsn) as victim:
        await cell.order(
            start_order(1, "sh", "-c", "trap 'echo told' TERM; echo deaf; while :; do sleep 0.1; done")
        )
        await cell.until(external_events.TaskStarted)
        for word, orders in (("deaf", [stop_order(2, "job-1.1.0", grace_ms=800)]), ("told", [])):
            await await_until(lambda word=word: word in printed(options, "job-1", "job-1.1.0"), f"{word!r}")
            await cell.order(*orders)
        await victim.kill()
    async with reporter_process(options, dsn):
        exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.signal) == ("stopped", signal.SIGKILL)


async def test_exits_are_reported_before_the_node_joins(
    dsn: str, options: Options, cell: Cell, tmp_path: Path
) -> None:
    """A task ended while no reporter was there: its code is on disk, and whoever hears NodeJoined knows
    it."""
    async with reporter_process(options, dsn) as victim:
        before = (await cell.next_join()).incarnation
        await cell.order(
            start_order(1, "sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 7")
        )
        await cell.until(external_events.TaskStarted)
        await victim.kill()
    (tmp_path / "go").touch()
    await await_until(lambda: not ours(options), "the end of all")
    async with reporter_process(options, dsn):
        joined = await cell.next_join(before)
    assert joined.tasks == ()
    once = {
        envelope.id: envelope.data for envelope in cell.envelopes
    }  # killed before the acknowledgement: repeats
    types = [type(event).__name__ for event in once.values()]
    assert types == ["NodeJoined", "TaskStarted", "TaskExited", "NodeJoined"]
    assert [event.exit_code for event in once.values() if isinstance(event, external_events.TaskExited)] == [
        7
    ]


async def test_orphans_are_dead_before_the_node_joins(dsn: str, options: Options, cell: Cell) -> None:
    """The journal was lost (a new disk): what runs under our marks and nobody knows must not hold a GPU."""
    async with reporter_process(options, dsn) as victim:
        before = (await cell.next_join()).incarnation
        await cell.order(start_order(1, "sh", "-c", "setsid sleep 610 & sleep 620"))
        started = await cell.until(external_events.TaskStarted)
        await victim.kill()
    for path in options.state_dir.glob("journal.sqlite*"):
        path.unlink()
    async with reporter_process(options, dsn):
        joined = await cell.next_join(before)
        assert joined.tasks == ()
        assert (
            not psutil.pid_exists(started.pid) or psutil.Process(started.pid).status() == psutil.STATUS_ZOMBIE
        )
        assert ours(options, "sleep") == []


async def test_sigterm_leaves_tasks_running(dsn: str, options: Options, cell: Cell, tmp_path: Path) -> None:
    """An upgrade of the reporter: stop, start, nothing happened to the training."""
    async with reporter_process(options, dsn) as first:
        await cell.order(
            start_order(1, "sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3")
        )
        await cell.until(external_events.TaskStarted)
        assert await first.terminate() == 0
    async with reporter_process(options, dsn):
        (tmp_path / "go").touch()
        assert (await cell.until(external_events.TaskExited)).exit_code == 3


async def test_two_reporters_do_not_share_a_state_folder(dsn: str, options: Options, cell: Cell) -> None:
    """Started twice by mistake: the second one reports it and ends with the status for wrong settings."""
    async with (
        reporter_process(options, dsn),
        reporter_process(options, dsn, failpoint="node.order_read:1") as second,
    ):
        assert await second.child.wait() == 2


async def test_a_full_disk_stops_orders_and_not_tasks(dsn: str, options: Options, cell: Cell) -> None:
    """The journal cannot be written: no order is acted on; once there is room again, the order is obeyed."""
    async with reporter_process(options, dsn) as reporter:
        await cell.order(start_order(1, "sh", "-c", "sleep 0.2; exit 4", gpus=(1,)))
        await cell.until(external_events.TaskStarted)
        resource.prlimit(reporter.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await cell.order(start_order(2, "true"))
        await asyncio.sleep(0.5)  # clock: in which it would start
        await cell.read(0)
        assert len(cell.events(external_events.TaskStarted)) == 1
        assert ours(options, "true") == []
        resource.prlimit(
            reporter.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        await cell.until(external_events.TaskExited, task_id="job-2.1.0")
        assert (await cell.until(external_events.TaskExited, task_id="job-1.1.0")).exit_code == 4
    await await_until(lambda: not ours(options, "sh"), "the end of all")


@pytest.mark.kafka
async def test_on_kafka_the_same_story(kafka_bootstrap: str, options: Options) -> None:
    """Started, killed -9 at the worst moment, found again, stopped: over the real broker."""
    log = await KafkaLog(kafka_bootstrap, "placer").start()
    await log.create(TOPICS)
    nodes = Partition(Topic.NODES, 0)
    cell = Cell(log, (await log.end_offsets([nodes]))[nodes])
    url = f"kafka://{kafka_bootstrap}"
    async with reporter_process(options, url, failpoint="node.task_spawned:1") as victim:
        await cell.order(start_order(1, "sleep", "600"))
        await victim.killed()
    async with reporter_process(options, url):
        await cell.order(start_order(1, "sleep", "600"), stop_order(2, "job-1.1.0"))
        exited = await cell.until(external_events.TaskExited)
    assert (exited.cause, exited.signal) == ("stopped", signal.SIGTERM)
    assert len(cell.ids(external_events.TaskStarted)) == 1
    await cell.close()
    await log.close()


async def test_many_tasks_under_many_kills(dsn: str, options: Options, cell: Cell, tmp_path: Path) -> None:
    """Thirty tasks on two GPUs while the reporter is killed again and again, at whatever moment it is.

    The judge is a diary that the tasks themselves write: each runs once, and never two at once on one GPU.
    """
    orders = []
    for token in range(1, 31):
        gpu = token % 2
        script = (
            f"echo begin {token} >> {tmp_path}/gpu{gpu}; sleep 0.1; echo end {token} >> "
            f"{tmp_path}/gpu{gpu}; exit {token}"
        )
        orders.append(start_order(token, "sh", "-c", script, gpus=(gpu,)))
    for number in range(7):
        async with reporter_process(options, dsn) as victim:
            await cell.order(*orders[: number * 5][-2:], *orders[number * 5 : number * 5 + 5])
            await asyncio.sleep(0.05 + 0.07 * number)  # clock: a moment of the kill, any of which is right
            await victim.kill()
    async with reporter_process(options, dsn):
        for token in range(1, 31):
            answer = await cell.until(
                external_events.TaskExited, external_events.OrderRefused, task_id=f"job-{token}.1.0"
            )
            if isinstance(answer, external_events.TaskExited):
                assert answer.exit_code == token
    ran = []
    for gpu in (0, 1):
        lines = (tmp_path / f"gpu{gpu}").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["begin", "end"] * (len(lines) // 2)
        ran += [int(line.split()[1]) for line in lines[::2]]
    refused = {
        event.token
        for event in cell.events(external_events.OrderRefused)
        if isinstance(event, external_events.OrderRefused)
    }
    assert len(ran) == len(set(ran)), "a task ran twice"
    assert set(ran) | refused == set(range(1, 31)), "a task was lost"
    assert not set(ran) & refused, "a refused task ran"
