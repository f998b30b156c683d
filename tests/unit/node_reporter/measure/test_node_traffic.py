"""Memory traffic on a tree of files as the kernel lays it out (filesystems/resctrl.rst): rates, groups, and
counters that fail."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_services.node_reporter.core.reports.traffic import LEAST_CAPACITY_MB_S, Capacity, Rate
from penstock_services.node_reporter.shell.measure.resctrl_monitor import TOTAL, TrafficMonitor

MB = 1_000_000


def counters(group: Path, *counts: object) -> Path:
    """A group's counters, one per socket."""
    for socket, count in enumerate(counts):
        folder = group / f"mon_data/mon_L3_{socket:02}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOTAL).write_text(f"{count}\n")
    return group


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets; four counters, of which one is the root group's, and one each is for the two caps."""
    for name, text in (
        ("L3_MON/mon_features", "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"),
        ("L3_MON/num_rmids", "4\n"),
        ("MB/num_closids", "2\n"),
    ):
        (tmp_path / "info" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "info" / name).write_text(text)
    (tmp_path / "mon_groups").mkdir()
    (tmp_path / "tasks").write_text("1\n")
    return counters(tmp_path, 0, 0)


@pytest.fixture
def child() -> Iterator[int]:
    """A process below this one, which stands for a task's shim."""
    pid = os.fork()
    if not pid:
        os.read(os.pipe()[0], 1)
        os._exit(0)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_traffic_is_what_the_counters_have_grown(root: Path) -> None:
    """The machine has moved 3 GB in 2 s, over both sockets together."""
    monitor, rate = TrafficMonitor("n1-ab", root), Rate()
    assert monitor.usable
    assert rate.mb_s(monitor.of_machine(), 10.0) is None
    counters(root, 1_000 * MB, 2_000 * MB)
    assert rate.mb_s(monitor.of_machine(), 12.0) == 1_500.0


def test_the_machines_traffic_has_that_of_capped_tasks(root: Path) -> None:
    """Their groups stand beside the root group, whose counters leave them out; monitoring groups lie in it,
    and count there already."""
    counters(root, 10, 0)
    counters(root / "n1-ab@capped@1", 5, 0)
    counters(root / "mon_groups/n1-ab@t@2", 3, 0)
    assert sum(TrafficMonitor("n1-ab", root).of_machine().values()) == 15


@pytest.mark.parametrize("broken", ["Unavailable", "Error", "Unassigned", ""])
def test_a_counter_that_fails_costs_two_looks_and_no_wrong_figure(root: Path, broken: str) -> None:
    """The sum over the other socket would look as if traffic had fallen by half; a new reading measures
    nothing of the time before."""
    monitor, rate = TrafficMonitor("n1-ab", root), Rate()
    found = []
    for second, counts in enumerate(
        ((0, 0), (MB, MB), (2 * MB, broken), (3 * MB, 9 * MB), (4 * MB, 10 * MB))
    ):
        counters(root, *counts)
        found.append(rate.mb_s(monitor.of_machine(), second))
    assert found == [None, 2.0, None, None, 2.0]


def test_counters_that_go_back_or_go_missing(root: Path) -> None:
    """A group was made anew, a socket was taken offline."""
    rate = Rate()
    assert rate.mb_s({"0": 100 * MB, "1": 5}, 1.0) is None
    assert rate.mb_s({"0": 1 * MB, "1": 7}, 2.0) is None
    assert rate.mb_s({"0": 4 * MB, "1": 7}, 3.0) == 3.0
    assert rate.mb_s({"0": 5 * MB}, 4.0) is None
    assert rate.mb_s({"0": 6 * MB}, 4.0) is None, "no time has passed"
    assert rate.mb_s({}, 5.0) is None


def test_percent_is_of_what_the_operator_says_or_of_the_largest_seen() -> None:
    """Without a figure the first traffic is not the whole of what the node can do: no server does less than
    one channel."""
    assert Capacity(50_000).percent(25_000) == 50.0
    assert Capacity(50_000).percent(60_000) == 120.0
    seen = Capacity(None)
    assert seen.percent(LEAST_CAPACITY_MB_S / 4) == 25.0
    assert seen.percent(4 * LEAST_CAPACITY_MB_S) == 100.0
    assert seen.percent(LEAST_CAPACITY_MB_S) == 25.0


def test_a_task_has_a_group_of_its_own_as_long_as_there_are_counters(root: Path, child: int) -> None:
    """Four counters, two reserved for caps: the third task shares the root group's, and has no traffic of its
    own."""
    monitor = TrafficMonitor("n1-ab", root)
    for name in ("a@1", "b@1", "c@1"):
        monitor.follow(name, os.getpid())
    groups = root / "mon_groups"
    assert sorted(group.name for group in groups.iterdir()) == ["n1-ab@a@1", "n1-ab@b@1"]
    assert str(child) in (groups / "n1-ab@a@1/tasks").read_text().split()
    counters(groups / "n1-ab@a@1", 7, 8)
    assert sum(monitor.of_task("a@1").values()) == 15
    assert monitor.of_task("c@1") == {}
    (groups / "n1-ab@b@1/tasks").unlink()
    monitor.forget("b@1")
    monitor.forget("b@1")
    monitor.follow("c@1", os.getpid())
    assert (groups / "n1-ab@c@1").exists()
    assert not (groups / "n1-ab@b@1").exists()


def test_a_task_that_is_capped_is_counted_in_that_group_and_afterwards_in_its_own_again(
    root: Path, child: int
) -> None:
    """With a cap its threads leave the monitoring group; without, the kernel puts them into the root
    group."""
    monitor, rate = TrafficMonitor("n1-ab", root), Rate()
    monitor.follow("a@1", os.getpid())
    own, cap = root / "mon_groups/n1-ab@a@1", root / "n1-ab@a@1"
    counters(own, 0, 0)
    assert rate.mb_s(monitor.of_task("a@1"), 1.0) is None
    counters(cap, 900 * MB, 0)
    assert rate.mb_s(monitor.of_task("a@1"), 2.0) is None, "another group's counters"
    counters(cap, 901 * MB, 0)
    assert rate.mb_s(monitor.of_task("a@1"), 3.0) == 1.0
    for path in sorted(cap.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cap.rmdir()
    (own / "tasks").write_text("")
    assert rate.mb_s(monitor.of_task("a@1"), 4.0) is None
    assert str(child) in (own / "tasks").read_text().split()


def test_counters_of_tasks_that_have_ended_are_freed_and_those_of_others_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter was killed meanwhile; another reporter has groups, too."""
    groups = root / "mon_groups"
    for name, tasks in (("n1-ab@gone@1", ""), ("n1-ab@runs@2", "17\n"), ("n2-cd@gone@1", "")):
        (groups / name).mkdir()
        (groups / name / "tasks").write_text(tasks)
    removed: list[str] = []
    monkeypatch.setattr(Path, "rmdir", lambda group: removed.append(group.name))  # a real one has files
    TrafficMonitor("n1-ab", root).sweep()
    assert removed == ["n1-ab@gone@1"]


@pytest.mark.parametrize("features", [None, "llc_occupancy\n"])
def test_a_machine_without_counters_has_no_traffic_and_no_groups(
    tmp_path: Path, features: str | None
) -> None:
    """No resctrl at all, or one that only watches caches."""
    if features is not None:
        (tmp_path / "info/L3_MON").mkdir(parents=True)
        (tmp_path / "info/L3_MON/mon_features").write_text(features)
    monitor = TrafficMonitor("n1-ab", tmp_path)
    assert not monitor.usable
    monitor.follow("a@1", os.getpid())
    monitor.forget("a@1")
    monitor.sweep()
    assert (monitor.of_machine(), monitor.of_task("a@1")) == ({}, {})
    assert not (tmp_path / "mon_groups").exists()
