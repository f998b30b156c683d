"""Groups on a node-reporter with real processes: members live on one GPU at once, a stranger waits, and
nobody is restarted."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from penstock.model.decisions.orders import Companion, StartTask
from penstock.model.inputs import external_events
from penstock_services.node_reporter.options import IsolationChoice, Options
from penstock_services.node_reporter.shell.process.savers import SAVERS
from penstock_services.node_reporter.shell.process.task_folders import PHASES, WORK
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    Cell,
    end_tasks,
    node_options,
    ours,
    printed,
    start_order,
    stop_order,
    working,
)
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
nothing_left = node_fixtures.nothing_left


def beside(token: int, *members: StartTask, seconds: int) -> StartTask:
    companions = tuple(Companion(task_id=order.task_id, token=order.token) for order in members)
    return start_order(token, "sleep", str(seconds), companions=companions)


async def started(cell: Cell, order: StartTask) -> psutil.Process:
    found = await cell.until(external_events.TaskStarted, task_id=order.task_id)
    return psutil.Process(found.pid)


async def test_members_live_on_one_gpu_and_a_stranger_waits(node: Options, cell: Cell) -> None:
    """`a` trains; `b` joins it, and its reporter starts over from the journal; `a` is stopped, `c` joins `b`.
    A stranger that was ordered meanwhile starts when all of them are gone, and `b` has had one process all
    the time."""
    a = start_order(1, "sleep", "600")
    b = beside(2, a, seconds=601)
    stranger = start_order(4, "true", task_id="stranger.1.w0", job_id="stranger")
    await cell.order(a)
    first = await started(cell, a)
    await cell.order(b)
    second = await started(cell, b)
    assert first.is_running()
    assert os.sched_getaffinity(first.pid) == os.sched_getaffinity(second.pid)
    (launcher,) = [found for found in ours(node, "penstock-launch") if found.ppid() == os.getpid()]
    launcher.kill()
    await cell.until(external_events.NodeJoined, count=2)
    c = beside(3, a, b, seconds=602)
    await cell.order(c)
    third = await started(cell, c)
    await cell.order(stranger)
    await cell.order(stop_order(5, a.task_id))
    exited = await cell.until(external_events.TaskExited, task_id=a.task_id)
    assert exited.cause == "stopped"
    await cell.order(start_order(6, "true", gpus=(1,)))
    await cell.until(external_events.TaskExited, task_id="job-6.1.0")
    assert second.is_running()
    assert third.is_running()
    assert not [
        found for found in cell.events(external_events.TaskStarted) if found.task_id == stranger.task_id
    ]  # type: ignore[attr-defined]
    third.kill()
    await cell.until(external_events.TaskExited, task_id=c.task_id)
    assert second.is_running()
    second.kill()
    await cell.until(external_events.TaskExited, task_id=b.task_id)
    assert (await cell.until(external_events.TaskExited, task_id=stranger.task_id)).exit_code == 0
    await await_until(lambda: not ours(node, "sleep"), "the end of all")


TURNS = """
import fcntl, os, sys, time
folder, name = os.environ["PENSTOCK_GROUP"], sys.argv[1]
lock = os.open(os.path.join(folder, "gpu"), os.O_RDWR | os.O_CREAT, 0o600)
written = ""
while written.count(name) < 200 or written.count(sys.argv[2]) < 100:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(os.path.join(folder, "trace"), "a") as trace:
        trace.write(name + "+")
        trace.flush()
        time.sleep(0.002)
        trace.write(name + "-")
    written = open(os.path.join(folder, "trace")).read()
    fcntl.flock(lock, fcntl.LOCK_UN)
    time.sleep(0.002)
os.chdir(folder)
print(open("trace").read(), sorted(os.listdir(os.path.dirname(folder))), flush=True)
time.sleep(600)
"""


def takes_turns(token: int, name: str, other: str, *members: StartTask, **more: object) -> StartTask:
    """Locks and writes a hundred times at least, until the other one has fifty times; prints what everybody
    wrote and which folders lie beside the group's, and stays."""
    companions = tuple(Companion(task_id=order.task_id, token=order.token) for order in members)
    return start_order(token, sys.executable, "-c", TURNS, name, other, companions=companions, **more)


def output(options: Options, order: StartTask) -> str:
    return printed(options, order.job_id, order.task_id)


def folders(options: Options) -> list[str]:
    return sorted(path.name for path in (options.state_dir / "groups").iterdir() if path.is_dir())


@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_members_take_turns_by_locks_in_the_folder_of_their_group(
    options: Options, broker: MemoryBroker, cell: Cell, isolation: IsolationChoice
) -> None:
    """`a` has its GPU alone when it starts, and trains on while `b` joins it after its reporter has started
    over: both lock the same file. A stranger on another GPU has a folder of its own. The last who leaves
    takes the folder along."""
    options = replace(options, isolation=isolation)
    a = takes_turns(1, "a", "b")
    b = takes_turns(2, "b", "a", a)
    stranger = takes_turns(3, "s", "s", gpus=(1,))
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(a, stranger)
        await started(cell, a)
        await started(cell, stranger)
        [*both] = folders(options)
        assert len(both) == 2
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.until(external_events.NodeJoined, count=2)
        assert folders(options) == both
        await cell.order(b)
        second = await started(cell, b)
        assert folders(options) == both
        await await_until(
            lambda: all("\n" in output(options, order) for order in (a, b, stranger)),
            "what they have written",
        )
        turns = max((output(options, order) for order in (a, b)), key=len).split()[0]
        assert re.fullmatch(r"(a\+a-|b\+b-){150,}", turns), "nobody writes within another's turn"
        assert re.search(r"b\+b-a\+", turns), "they meet"
        assert re.fullmatch(r"(s\+s-){100} .*", output(options, stranger).strip())
        if isolation is IsolationChoice.AUTO:
            assert output(options, stranger).strip().endswith(f"['group', '{PHASES}', '{SAVERS}', '{WORK}']")
        await cell.order(stop_order(4, a.task_id))
        await cell.until(external_events.TaskExited, task_id=a.task_id)
        assert folders(options) == both, "b is still in it"
        second.kill()
        await cell.until(external_events.TaskExited, task_id=b.task_id)
        await cell.order(stop_order(5, stranger.task_id))
        await cell.until(external_events.TaskExited, task_id=stranger.task_id)
        groups = options.state_dir / "groups"
        await await_until(lambda: not list(groups.iterdir()), lambda: list(groups.iterdir()))


@pytest.mark.parametrize("gpus", [(), (0,)])
async def test_who_can_never_be_a_member_has_no_folder(
    node: Options, cell: Cell, gpus: tuple[int, ...]
) -> None:
    """A job without GPUs, and one with a part of a GPU."""
    order = start_order(1, "sh", "-c", "echo none: ${PENSTOCK_GROUP-none}", gpus=gpus)
    share = 500 if gpus else order.place.gpu_share_milli
    await cell.order(structs.replace(order, place=structs.replace(order.place, gpu_share_milli=share)))
    assert (await cell.until(external_events.TaskExited)).exit_code == 0
    assert output(node, order) == "none: none\n"
    assert folders(node) == []


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="penstock-groups-") as found:
        Path(found).chmod(0o755)
        yield Path(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tasks as another user")
@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_members_of_another_user_lock_in_their_folder_and_write_nowhere_beside_it(
    broker: MemoryBroker, cell: Cell, place: Path, isolation: IsolationChoice
) -> None:
    """The reporter is root, tasks are nobody: the folder is theirs, those of all groups are not."""
    options = node_options(place, task_user="nobody", allow_root=False, isolation=isolation)
    script = 'cd "$PENSTOCK_GROUP" && flock gpu true && ! touch ../beside && ls -ld . | cut -c1-10'
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(order := start_order(1, "sh", "-c", script))
        exited = await cell.until(external_events.TaskExited)
        assert (exited.cause, exited.exit_code) == ("exited", 0), output(options, order)
    assert output(options, order).endswith("drwx------\n")
    end_tasks(options)
