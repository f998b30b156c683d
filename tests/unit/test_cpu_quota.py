"""Quotas of processor time: on a tree of files as the kernel lays it out (cgroup v2), and on this machine's own `cpu` hierarchy where it is that of v1."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.cgroups import own_groups
from penstock_services.node_reporter.shell.cpu_quota import CpuQuota

MOUNTED = own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()).get(
    "cpu"
)
REAL = CpuQuota("penstock-test", MOUNTED, None)
needs_v1 = pytest.mark.skipif(not REAL.usable, reason="no `cpu` hierarchy of cgroup v1 that can be written")
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
        while len(children(shim)) < count:
            time.sleep(0.001)
        yield shim
    finally:
        os.killpg(shim, signal.SIGKILL)
        os.waitpid(shim, 0)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def used_s(pids: list[int], within_s: float) -> float:
    """Processor time of these processes during so long."""
    before = sum(processor_s(pid) for pid in pids)
    time.sleep(within_s)
    return sum(processor_s(pid) for pid in pids) - before


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@needs_v1
def test_a_capped_task_gets_a_part_of_its_cores_time_however_many_processes_it_has() -> None:
    """Two processes on one core, 20 % of it for both together: at most that and what a period begins with. Once the cap is lifted its group is gone."""
    assert MOUNTED is not None
    group = MOUNTED / "penstock-test@t@1"
    with spinning(2) as shim:
        assert REAL.cap("t@1", shim, (), 1, 20) == ""
        assert used_s(children(shim), SPINS_S) <= 0.2 * SPINS_S + 0.1
        REAL.sweep()
        assert group.exists(), "its task still runs"
        assert REAL.cap("t@1", shim, (), 1, None) == ""
        assert not group.exists()
        assert REAL.cap("t@1", shim, (), 1, None) == ""
        memberships = {Path(f"/proc/{pid}/cgroup").read_text() for pid in children(shim)}
        assert memberships == {Path("/proc/self/cgroup").read_text()}


@needs_v1
def test_the_group_of_a_task_that_has_ended_is_removed() -> None:
    assert MOUNTED is not None
    with spinning(1) as shim:
        assert REAL.cap("t@2", shim, (), 1, 50) == ""
    deadline = time.monotonic() + 10
    while (MOUNTED / "penstock-test@t@2").exists():
        REAL.sweep()
        assert time.monotonic() < deadline


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A delegated folder of cgroup v2; what a trial group in it has comes with it."""
    (tmp_path / f"penstock-trial-{os.getpid()}").mkdir()
    (tmp_path / f"penstock-trial-{os.getpid()}/cpu.max").write_text("max 100000\n")
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


def test_a_machine_without_the_controller_has_no_quotas(tmp_path: Path) -> None:
    for v1, v2 in ((None, None), (tmp_path / "absent", tmp_path / "absent"), (None, tmp_path)):
        assert not CpuQuota("n1", v1, v2).usable
