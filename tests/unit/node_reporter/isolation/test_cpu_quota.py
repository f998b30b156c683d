"""Quotas of processor time: on a tree of files as the kernel lays it out (cgroup v2), and on this machine's
own `cpu` hierarchy where it is that of v1."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.limits.cpu_quota import CpuQuota
from tests.support.processes import processor_s
from tests.support.waiting import wait_until

NAME = f"penstock-test-{os.getpid()}"
"""The hierarchy is the whole machine's."""
V1 = Cgroups(NAME, None).quota_v1
REAL = CpuQuota(NAME, V1, None)
needs_v1 = pytest.mark.skipif(V1 is None, reason="no `cpu` hierarchy of cgroup v1 that can be written")
SPINS_S = 1.0


@contextmanager
def spinning(count: int) -> Iterator[int]:
    """Processes that compute below one that waits; the latter's pid."""
    shim = os.fork()
    if not shim:
        os.setpgid(0, 0)
        for _ in range(count):
            if not os.fork():
                while True:
                    pass
        signal.pause()
    try:
        wait_until(lambda: len(psutil.Process(shim).children()) == count, "its children")
        yield shim
    finally:
        os.killpg(shim, signal.SIGKILL)
        os.waitpid(shim, 0)


@needs_v1
def test_a_capped_task_gets_a_part_of_its_cores_time_however_many_processes_it_has() -> None:
    """Two processes on one core, 20 % of it for both together: at most that and what a period begins with.
    Once the cap is lifted its group is gone."""
    assert V1 is not None
    group = V1 / f"{NAME}@t@1"
    with spinning(2) as shim:
        assert REAL.cap("t@1", shim, (), 1, 20) == ""
        began_s = time.monotonic()  # clock: on a slow machine more time passes; the bound holds for any
        before_s = processor_s(shim)
        time.sleep(SPINS_S)  # clock: as above, the time that has really passed is taken
        used_s = processor_s(shim) - before_s
        assert used_s <= 0.2 * (time.monotonic() - began_s) + 0.1  # clock: as above, of the same interval
        REAL.sweep()
        assert group.exists(), "its task still runs"
        assert REAL.cap("t@1", shim, (), 1, None) == ""
        assert not group.exists()
        assert REAL.cap("t@1", shim, (), 1, None) == ""
        children = psutil.Process(shim).children()
        memberships = {Path(f"/proc/{child.pid}/cgroup").read_text() for child in children}
        assert memberships == {Path("/proc/self/cgroup").read_text()}


@needs_v1
def test_the_group_of_a_task_that_has_ended_is_removed() -> None:
    assert V1 is not None
    with spinning(1) as shim:
        assert REAL.cap("t@2", shim, (), 1, 50) == ""
    group = V1 / f"{NAME}@t@2"
    wait_until(lambda: (REAL.sweep(), not group.exists())[1], "its removal, once its last process has gone")


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A delegated folder of cgroup v2 with a task's group."""
    group = tmp_path / "n1@3"
    group.mkdir()
    (group / "cpu.max").write_text("max 100000\n")
    return tmp_path


def test_in_cgroup_v2_the_tasks_own_group_has_the_quota(unified: Path) -> None:
    quota = CpuQuota("n1", None, unified)
    assert quota.usable
    groups = ["/elsewhere/n1@3", str(unified / "n1@3")]
    assert quota.cap("t@1", os.getpid(), groups, 2, 25) == ""
    assert (unified / "n1@3/cpu.max").read_text() == "50000 100000"
    (unified / "n1@3/cpu.max").write_text("")  # a tree of files is not emptied by a write
    assert quota.cap("t@1", os.getpid(), groups, 2, None) == ""
    assert (unified / "n1@3/cpu.max").read_text() == "max 100000"


def test_a_task_without_a_group_and_a_group_that_is_gone_are_answered(unified: Path) -> None:
    quota = CpuQuota("n1", None, unified)
    assert "no cgroup" in quota.cap("t@1", os.getpid(), ["/elsewhere/n1@3"], 1, 25)
    assert quota.cap("t@1", os.getpid(), ["/elsewhere/n1@3"], 1, None) == "", "it has no cap"
    assert "No such file" in quota.cap("t@1", os.getpid(), [str(unified / "gone")], 1, 25)


def test_a_machine_without_the_controller_has_no_quotas() -> None:
    assert not CpuQuota("n1", None, None).usable
