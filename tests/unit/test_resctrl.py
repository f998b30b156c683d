"""Caps of memory bandwidth on a tree of files as the kernel lays it out (filesystems/resctrl.rst); processes are real."""

import os
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.resctrl import Resctrl


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a machine with two sockets, in steps of 10 % from 10 % on."""
    (tmp_path / "info/MB").mkdir(parents=True)
    (tmp_path / "info/MB/min_bandwidth").write_text("10\n")
    (tmp_path / "info/MB/bandwidth_gran").write_text("10\n")
    (tmp_path / "schemata").write_text("    L3:0=fffff;1=fffff\n    MB:0=100;1=100\n")
    (tmp_path / "tasks").write_text("1\n")
    return tmp_path


def kernel_removes(group: Path) -> None:
    """With a group its files go; in a tree of files they have to go first."""
    for name in ("tasks", "schemata"):
        (group / name).unlink()


def test_a_cap_covers_every_memory_controller_and_all_below_the_shim(root: Path) -> None:
    """A CPU job's traffic slows a GPU job beside it; it has a child."""
    resctrl = Resctrl("n1-ab", root)
    assert resctrl.usable
    child = os.fork()
    if not child:
        os.read(os.pipe()[0], 1)
        os._exit(0)
    try:
        assert resctrl.cap("t@1", os.getpid(), 40) == ""
        group = root / "n1-ab@t@1"
        assert (group / "schemata").read_text().splitlines()[-1] == "MB:0=40;1=40"
        assert str(child) in (group / "tasks").read_text().split()
        assert resctrl.cap("t@1", os.getpid(), 4) == ""
        assert (group / "schemata").read_text().splitlines()[-1] == "MB:0=10;1=10"
        resctrl.sweep()
        assert group.exists()
        kernel_removes(group)
        assert resctrl.cap("t@1", os.getpid(), None) == ""
        assert not group.exists()
        assert resctrl.cap("t@1", os.getpid(), None) == ""
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_groups_of_tasks_that_have_ended_are_removed(root: Path) -> None:
    """A processor has eight of them. Another reporter's stay."""
    resctrl = Resctrl("n1-ab", root)
    for name, tasks in (("n1-ab@old@1", ""), ("n1-ab@runs@2", "17\n"), ("n2-cd@old@1", "")):
        (root / name).mkdir()
        (root / name / "tasks").write_text(tasks)
    (root / "n1-ab@empty@3").mkdir()
    resctrl.sweep()
    assert (root / "n1-ab@runs@2").exists()
    assert (root / "n2-cd@old@1").exists()


def test_a_machine_without_memory_bandwidth_allocation_says_so(tmp_path: Path) -> None:
    """No resctrl at all, or one that only partitions caches."""
    (tmp_path / "schemata").write_text("L3:0=fffff\n")
    for folder in (tmp_path, tmp_path / "absent"):
        resctrl = Resctrl("n1-ab", folder)
        assert not resctrl.usable
        assert "no resctrl" in resctrl.cap("t@1", os.getpid(), 40)
        resctrl.sweep()


def test_what_the_kernel_makes_of_a_cap_is_read_back(root: Path) -> None:
    """A domain that is missing afterwards is not capped."""
    resctrl = Resctrl("n1-ab", root)
    group = root / "n1-ab@t@1"
    group.mkdir()
    (group / "schemata").symlink_to("/dev/null")
    assert "reads {}" in resctrl.cap("t@1", os.getpid(), 40)
