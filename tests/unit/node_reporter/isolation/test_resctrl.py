"""Caps of memory bandwidth on a tree of files as the kernel lays it out (filesystems/resctrl.rst); processes
are real."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.limits.resctrl import Resctrl

MOUNTED_IN_MIB = 2**32 - 1


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
    for file in group.iterdir():
        file.unlink()


def capped(resctrl: Resctrl, root: Path, percent: int) -> str:
    """The line that caps this process."""
    assert resctrl.cap("t@1", os.getpid(), percent) == ""
    return (root / "n1-ab@t@1/schemata").read_text().splitlines()[-1]


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


@pytest.fixture
def absolute(root: Path) -> Callable[[int], Path]:
    """The same machine where the processor or the mount counts in units of bandwidth, of which this many are
    no limit."""

    def of(unlimited: int) -> Path:
        (root / "info/MB/min_bandwidth").write_text("0\n" if unlimited < MOUNTED_IN_MIB else "10\n")
        (root / "info/MB/bandwidth_gran").write_text("1\n" if unlimited < MOUNTED_IN_MIB else "10\n")
        (root / "schemata").write_text(f"    L3:0=ffff;1=ffff\n    MB:0={unlimited:>4};1={unlimited:>4}\n")
        return root

    return of


@pytest.mark.parametrize("unlimited", [2_048, 4_096])
def test_on_amd_a_cap_is_a_part_of_the_nodes_bandwidth_in_eighths_of_a_gb_s(
    absolute: Callable[[int], Path], unlimited: int
) -> None:
    """Two sockets with 400 GB/s together. Half of it is 100 GB/s through each last-level cache, so 800
    eighths; the largest number that the processor takes, 256 or 512 GB/s, has nothing to do with what the
    memory can do."""
    root = absolute(unlimited)
    resctrl = Resctrl("n1-ab", root, 400_000)
    assert resctrl.usable
    assert capped(resctrl, root, 50) == "MB:0=800;1=800"
    assert capped(resctrl, root, 10) == "MB:0=160;1=160"


def test_a_cap_is_never_nothing_and_never_above_what_the_processor_takes(
    absolute: Callable[[int], Path],
) -> None:
    """1 % of one channel is less than an eighth of a GB/s; 100 % of what an operator stated by mistake is
    more than 256 GB/s."""
    root = absolute(2_048)
    assert capped(Resctrl("n1-ab", root, 20_000), root, 1) == "MB:0=1;1=1"
    assert capped(Resctrl("n1-ab", root, 4_000_000), root, 100) == "MB:0=2048;1=2048"


def test_a_mount_in_mib_s_gets_mib_s(absolute: Callable[[int], Path]) -> None:
    """`mount -o mba_MBps` on an Intel machine with 200 GB/s: half of it is 50 GB/s per socket, 47,683
    MiB/s."""
    root = absolute(MOUNTED_IN_MIB)
    resctrl = Resctrl("n1-ab", root, 200_000)
    assert resctrl.usable
    assert capped(resctrl, root, 50) == "MB:0=47683;1=47683"


@pytest.mark.parametrize("unlimited", [2_048, MOUNTED_IN_MIB])
def test_a_percentage_of_an_unknown_bandwidth_is_no_cap(
    absolute: Callable[[int], Path], unlimited: int
) -> None:
    """The operator has not stated the memory's bandwidth. The node does not announce caps, so the guard
    halves cores there; an order for one all the same is answered with what is missing, and no file is
    written."""
    root = absolute(unlimited)
    resctrl = Resctrl("n1-ab", root)
    assert not resctrl.usable
    assert "--memory-bandwidth-mb-s" in resctrl.cap("t@1", os.getpid(), 50)
    assert not (root / "n1-ab@t@1").exists()


def test_a_cap_is_lifted_where_no_other_could_be_set_any_more(absolute: Callable[[int], Path]) -> None:
    """The operator has removed the option; a task of before still has its cap."""
    root = absolute(2_048)
    assert capped(Resctrl("n1-ab", root, 400_000), root, 50) == "MB:0=800;1=800"
    resctrl = Resctrl("n1-ab", root)
    kernel_removes(root / "n1-ab@t@1")
    assert resctrl.cap("t@1", os.getpid(), None) == ""
    assert not (root / "n1-ab@t@1").exists()


@pytest.mark.parametrize("line", ["MB:0=2048;1=64", "MB:0=64;1=64", "MB:0=2000;1=2000", "MB:0=50;1=100"])
def test_a_machine_whose_root_group_is_capped_has_no_known_unit(root: Path, line: str) -> None:
    """An administrator has capped what runs outside of jobs: 64 may be percent, or eighths of a GB/s. No cap
    rather than a wrong one."""
    (root / "schemata").write_text(f"    L3:0=ffff;1=ffff\n    {line}\n")
    resctrl = Resctrl("n1-ab", root, 400_000)
    assert not resctrl.usable
    assert "root group" in resctrl.cap("t@1", os.getpid(), 50)
    assert not (root / "n1-ab@t@1").exists()
