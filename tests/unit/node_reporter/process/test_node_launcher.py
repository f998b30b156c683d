"""Files that a shim writes whole: there complete or not at all, and nothing is left open when the disk
refuses."""

import json
import os
import resource
import threading
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.isolation.confinement import Confinement
from penstock_services.node_reporter.shell.isolation.task_groups import TaskGroups
from penstock_services.node_reporter.shell.isolation.whole_files import write_whole
from penstock_services.node_reporter.shell.process import shim as shim_module
from penstock_services.node_reporter.shell.process.shim import Shim
from penstock_services.node_reporter.shell.watchdogs.lease_watch import LeaseWatch, boot_s


def refuse(_descriptor: int, _data: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_a_refused_write_leaves_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim tries for hours to write down an exit on a full disk; it must not run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        for _ in range(5):
            with pytest.raises(OSError, match="No space"):
                write_whole(str(tmp_path), "exit.json", {"exit_code": 0})
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "exit.json").exists()
    write_whole(str(tmp_path), "exit.json", {"exit_code": 0})
    assert json.loads((tmp_path / "exit.json").read_text()) == {"exit_code": 0}


def test_a_run_lasts_as_long_as_it_did_whatever_the_clock_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's clock goes on by ten years while a task runs; the estimator learns from how long runs
    took."""
    shim = Shim.__new__(Shim)
    shim._folder, shim._groups = str(tmp_path), TaskGroups(Confinement())
    shim._request = {"task_id": "t", "token": 1, "oom": None, "pids": None}
    shim._lapsed, shim._unpacked_ns, shim._left = False, 0, 0
    shim._note_start()
    shim._reaped = 0, resource.getrusage(resource.RUSAGE_SELF)
    real = shim_module.now_ms
    monkeypatch.setattr(shim_module, "now_ms", lambda: real() + 10 * 365 * 86_400_000)
    shim._write_exit(None)
    found = json.loads((tmp_path / "exit.json").read_text())
    assert 0 <= found["exited_ms"] - found["started_ms"] < 365 * 86_400_000


def test_a_lease_that_ends_before_the_program_begins_ends_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter is dead, and the leader waits for a folder on a network: by now the job may run
    elsewhere."""
    shim, lease = Shim.__new__(Shim), LeaseWatch(str(tmp_path / "none"), lease_s=1, until_s=boot_s() + 3_600)
    shim._lapsed, shim._lease = False, lease
    (shim._failed_read, leaders), (taken, shim._taken_fd) = os.pipe(), os.pipe()
    monkeypatch.setattr(shim, "_kill_all", lambda: os.close(leaders))

    def ends_once_other_tasks_start() -> None:
        assert os.read(taken, 1) == b""
        lease._until_s = boot_s()
        lease._timer.set(lease._until_s)

    ends = threading.Thread(target=ends_once_other_tasks_start)
    ends.start()
    assert shim._until_executed() == b""
    assert shim._lapsed
    ends.join()
    os.close(taken)
