"""Folder and shim that lie ready for the next task: as good as new ones, and never another's leavings."""

import os
import stat
from pathlib import Path

import pytest

from penstock.model.inputs import external_events
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.linux import LinuxHost
from penstock_services.node_reporter.shell.ports import Callbacks
from penstock_services.node_reporter.shell.process import task_folders
from penstock_services.node_reporter.shell.process.task_folders import TaskFolders
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import Cell, ours, start_order, working
from tests.support.waiting import await_until

options, broker = node_fixtures.options, node_fixtures.broker
cell = node_fixtures.cell
nothing_left = node_fixtures.nothing_left


def task_folder(options: Options, token: int) -> Path:
    return options.state_dir / "tasks" / f"job-{token}.1.0@{token}"


def permissions(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return stat.filemode(found.st_mode), found.st_uid, found.st_gid


async def test_a_task_gets_the_folder_that_lay_ready(
    options: Options, cell: Cell, broker: MemoryBroker
) -> None:
    """One job after another comes to a quiet node: each finds a folder made before, of its own and empty."""
    spare = options.state_dir / "spare"
    async with working(options, MemoryLog(broker, "node-reporter")):
        inodes = set()
        for token in (7, 8):
            await await_until(spare.exists, "a folder that lies ready")
            ready = spare.stat().st_ino
            await cell.order(start_order(token, "sh", "-c", "ls -A; touch mine"))
            await cell.until(external_events.TaskExited, task_id=f"job-{token}.1.0")
            assert task_folder(options, token).stat().st_ino == ready
            inodes.add(ready)
            assert (options.log_dir / f"job-{token}" / f"job-{token}.1.0.log").read_text() == ""
        assert len(inodes) == 2


async def test_two_tasks_at_once_get_two_folders(options: Options, cell: Cell, broker: MemoryBroker) -> None:
    """A gang's members come in one read: the first takes the spare, the second is not made to wait for
    another."""
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(*(start_order(token, "true", gpus=(token - 7,)) for token in (7, 8)))
        await cell.until(external_events.TaskExited, count=2)
    first, second = (task_folder(options, token) for token in (7, 8))
    for name in ("", "phases", "work"):
        assert permissions(first / name) == permissions(second / name)
    assert permissions(first)[0] == "drwx------"
    assert permissions(first / "phases")[0] == "prw-------"


async def test_what_a_killed_reporter_left_is_no_tasks_folder(
    options: Options, cell: Cell, broker: MemoryBroker
) -> None:
    """It died while it made the spare; or somebody put files there meanwhile. The next job sees nothing of
    that."""
    left = options.state_dir / "spare"
    (left / "work").mkdir(parents=True)
    (left / "work" / "others").write_text("of another life")
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(7, "sh", "-c", 'ls -A; test -p "$PENSTOCK_PHASE_FILE" && echo whole'))
        exited = await cell.until(external_events.TaskExited)
    assert exited.exit_code == 0
    assert (options.log_dir / "job-7" / "job-7.1.0.log").read_text() == "whole\n"


async def test_a_task_with_a_folder_of_its_own_gets_no_other(
    options: Options, cell: Cell, broker: MemoryBroker, tmp_path: Path
) -> None:
    async with working(options, MemoryLog(broker, "node-reporter")):
        await cell.order(start_order(7, "true", workdir=str(tmp_path)))
        await cell.until(external_events.TaskExited)
        assert not (task_folder(options, 7) / "work").exists()


async def test_a_repeated_start_keeps_what_the_first_attempt_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter died between the rename and the request: its successor begins the same start in the same
    folder."""
    monkeypatch.setattr(task_folders, "REFILL_S", 3_600)
    folders, folder = TaskFolders(tmp_path), tmp_path / "tasks" / "t@1"
    folder.parent.mkdir()
    folders.prepare()
    folders.create(folder, work=True)
    made = os.stat(folder / "phases").st_ino
    again = TaskFolders(tmp_path)
    again.prepare()
    again.create(folder, work=True)
    assert os.stat(folder / "phases").st_ino == made
    assert sorted(os.listdir(folder)) == ["phases", "savers", "work"]
    assert sorted(os.listdir(tmp_path)) == ["spare", "tasks"]


async def test_a_full_disk_leaves_the_complaint_to_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for a spare: the node goes on, and the start that needs a folder says why it has
    none."""
    monkeypatch.setattr(task_folders, "REFILL_S", 3_600)
    (tmp_path / "state").write_text("a file, where a folder would have to be")
    folders = TaskFolders(tmp_path / "state")
    folders.prepare()
    with pytest.raises(OSError, match="state"):
        folders.create(tmp_path / "state" / "tasks" / "t@1", work=True)


async def test_the_shim_that_waits_is_no_orphan(options: Options) -> None:
    """A reporter that starts ends processes of unknown tasks, but not those that its launcher has ready."""
    host = LinuxHost(options)
    lock = await host.lock()
    launcher = host.launch(lock, Callbacks(lambda *_: None, lambda _: None, lambda: None))
    await await_until(lambda: len(ours(options, "penstock-shim")) == 2, "two shims")
    assert host.end_orphans({launcher.pid}) == 0
    launcher.close()
    host.unlock(lock)
    await await_until(lambda: not ours(options), "their end")
