"""Turns of a group by the kernel's locks: nobody is in a stage beside another, nobody starves or deadlocks, and whoever dies, hangs or is stopped costs the others little."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.sdk import turns
from penstock.sdk.stages import STAGES, WAITING, Recorder
from penstock.sdk.turns import Changes, Turn, Turns, turns_of_group

MEMBER = """
import os, sys, time
from penstock.sdk import stages, turns
from penstock.sdk.stages import iteration, stage
name, seconds, plan = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(",")
turns.MAX_WAIT_S = float(os.environ.get("BOUND", "10"))
trace = os.open("trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
says = lambda *words: os.write(trace, (" ".join(map(str, words)) + "\\n").encode())
iteration()
says("ready", name)
while not os.path.exists("go"):
    time.sleep(0.001)
ends, done = time.monotonic() + seconds, 0
while time.monotonic() < ends:
    iteration()
    for one in plan:
        resource, ms = one.split(":")
        with stage(resource):
            says("+", resource, name, time.monotonic())
            time.sleep(float(ms) / 1_000)
            says("-", resource, name, time.monotonic())
    done += 1
says("done", name, done, *stages.waits())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a group, with a reader that takes no line."""
    (tmp_path / "group").mkdir()
    monkeypatch.setenv(turns.GROUP, str(tmp_path / "group"))
    monkeypatch.setenv("PENSTOCK_PHASE_FILE", os.devnull)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


class Group:
    """Members as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, plan: str, seconds: float = 60.0, **env: str) -> None:
        command = [sys.executable, "-c", MEMBER, name, str(seconds), plan]
        self.members[name] = subprocess.Popen(command, cwd=self.folder, env={**os.environ, **env})

    def lines(self, kind: str) -> list[list[str]]:
        path = self.folder / "trace"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line[1:] for line in words if line[0] == kind]

    def go(self) -> None:
        eventually(lambda: len(self.lines("ready")) == len(self.members))
        (self.folder / "go").touch()

    def end(self) -> dict[str, tuple[int, float, int]]:
        """Name → iterations, seconds waited, turns missed."""
        for member in self.members.values():
            assert member.wait(60) == 0
        return {name: (int(done), float(s), int(missed)) for name, done, s, missed in self.lines("done")}

    def turns(self) -> dict[str, list[tuple[float, float, str]]]:
        """Resource → (entered, left, by whom) in the order of entering."""
        found: dict[str, list[tuple[float, float, str]]] = {}
        begun: dict[tuple[str, str], float] = {}
        for line in (self.folder / "trace").read_text().splitlines():
            kind, *rest = line.split()
            if kind == "+":
                begun[rest[0], rest[1]] = float(rest[2])
            elif kind == "-":
                found.setdefault(rest[0], []).append((begun[rest[0], rest[1]], float(rest[2]), rest[1]))
        return {name: sorted(rows) for name, rows in found.items()}


@pytest.fixture
def group(folder: Path) -> Iterator[Group]:
    found = Group(folder)
    yield found
    for member in found.members.values():
        with suppress(ProcessLookupError):
            member.kill()
        member.wait()


def eventually(what: Callable[[], bool], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.002)


def turn(folder: Path, name: str = "gpu", leaving: Callable[[], bool] = lambda: False) -> Turn:
    """Of a further member: locks belong to the open file, not to the process."""
    return Turn(str(folder / "group" / name), Changes(), leaving)


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_nobody_is_in_a_stage_beside_another_and_nobody_starves(group: Group) -> None:
    """Four members of which each wants the same resource again at once: the one that leaves would always be first at a plain lock."""
    for name in "abcd":
        group.start(name, "gpu:2", seconds=2.0)
    group.go()
    done = group.end()
    held = group.turns()["gpu"]
    assert all(left <= entered for (_, left, _), (entered, _, _) in pairwise(held))
    counts = sorted(count for count, _, _ in done.values())
    assert counts[0] > 50
    assert counts[-1] - counts[0] <= 0.05 * counts[-1]
    assert not sum(missed for _, _, missed in done.values())


def test_who_needs_different_resources_waits_for_nobody(group: Group) -> None:
    for name, resource in zip("abcd", STAGES, strict=True):
        group.start(name, f"{resource}:5", seconds=1.0)
    group.go()
    assert all(waited < 0.01 for _, waited, _ in group.end().values())


def test_the_death_of_a_holder_costs_the_others_less_than_a_second(group: Group) -> None:
    """`a` is killed in the middle of an endless stage."""
    group.start("a", "gpu:60000")
    group.go()
    eventually(lambda: len(group.lines("+")) == 1)
    group.start("b", "gpu:1", seconds=1.0)
    eventually(lambda: len(group.lines("ready")) == 2)
    time.sleep(0.5)
    assert len(group.lines("+")) == 1, "b waits"
    killed = time.monotonic()
    group.members.pop("a").kill()
    assert not sum(missed for _, _, missed in group.end().values())
    first = next(float(at) for _, name, at in group.lines("+") if name == "b")
    assert first - killed < 1.0


def test_who_never_leaves_a_stage_costs_the_others_the_bound_once(group: Group) -> None:
    """They go on beside it, without waiting for it again, and count how often."""
    group.start("a", "gpu:60000", BOUND="0.4")
    group.go()
    eventually(lambda: len(group.lines("+")) == 1)
    for name in "bc":
        group.start(name, "cpu:1,gpu:2", seconds=2.0, BOUND="0.4")
    hung = group.members.pop("a")
    done = group.end()
    hung.kill()
    hung.wait()
    for count, waited, missed in done.values():
        assert count > 50
        assert 0.35 < waited < 1.6
        assert missed >= count


def test_a_holder_that_was_given_up_is_waited_for_again_once_it_has_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_WAIT_S", 0.1)
    a, b = turn(folder), turn(folder)
    assert a.take()
    assert not b.take()
    assert b.missed == 1
    began = time.monotonic()
    assert not b.take()
    assert time.monotonic() - began < 0.05
    assert b.missed == 2
    a.leave()
    assert b.take()
    b.leave()
    assert a.take()
    in_background(lambda: (time.sleep(0.03), a.leave()))
    assert b.take(), "another turn of the same member"


def test_a_wait_is_bounded_per_holder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two holders, each of them within the bound, together beyond it."""
    monkeypatch.setattr(turns, "MAX_WAIT_S", 0.3)
    a, b, c = turn(folder), turn(folder), turn(folder)
    assert a.take()

    def others() -> None:
        assert b.take()
        time.sleep(0.2)
        b.leave()

    second = in_background(others)
    time.sleep(0.05)
    in_background(lambda: (time.sleep(0.2), a.leave()))
    assert c.take()
    second.join()
    assert c.missed == 0
    assert c.waited_s > 0.3


def test_who_is_stopped_in_line_is_passed(folder: Path) -> None:
    """`b` stands in line for what `a` has, and its process is stopped (a frozen cgroup): the turn is not kept for it, and the next one costs nothing."""
    a, b, c = turn(folder), turn(folder), turn(folder)
    assert a.take()
    b._stand_in_line()
    in_background(lambda: (time.sleep(0.05), a.leave()))
    began = time.monotonic()
    assert c.take()
    assert turns.PATIENCE_S <= time.monotonic() - began < 1.0
    c.leave()
    began = time.monotonic()
    assert c.take()
    assert time.monotonic() - began < 0.05
    assert c.missed == 0


def test_who_is_to_save_and_end_waits_for_nobody(folder: Path) -> None:
    """SIGTERM in the middle of a wait: the rest of the iteration must fit into the grace."""
    a, asked = turn(folder), threading.Event()
    b = turn(folder, leaving=asked.is_set)
    assert a.take()
    in_background(lambda: (time.sleep(0.1), asked.set()))
    began = time.monotonic()
    assert not b.take()
    assert 0.05 < time.monotonic() - began < 1.0
    assert b.missed == 0


def test_an_interrupted_wait_holds_nothing_and_stands_in_line_no_more(folder: Path) -> None:
    """A handler that raises in the middle of a wait, such as that of Ctrl-C."""

    def interrupted() -> bool:
        raise KeyboardInterrupt

    a, b, c = turn(folder), turn(folder, leaving=interrupted), turn(folder)
    assert a.take()
    with pytest.raises(KeyboardInterrupt):
        b.take()
    a.leave()
    began = time.monotonic()
    assert c.take()
    assert time.monotonic() - began < 0.05


def test_without_inotify_turns_are_taken_by_looking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's instances are used up."""
    a, changes = turn(folder), Changes()
    changes.close()
    b = Turn(str(folder / "group" / "gpu"), changes)
    assert a.take()
    in_background(lambda: (time.sleep(0.1), a.leave()))
    assert b.take()
    assert b.waited_s < 0.3


def recorder(folder: Path, lines: list[str] | None = None) -> Recorder:
    found: list[str] = [] if lines is None else lines
    return Recorder(write=lambda line: bool(found.append(line)) or True, join=lambda: group_of(folder))


def group_of(folder: Path) -> Turns:
    return Turns(str(folder / "group"), STAGES, lambda: False)


def free(folder: Path, name: str) -> bool:
    other = turn(folder, name)
    try:
        return other._lock(1, turns.HELD, 1)
    finally:
        other.close()


def test_a_stage_inside_another_gives_the_outer_one_back_meanwhile(folder: Path) -> None:
    """Two that nest in opposite order would else wait for each other for ever."""
    marks = recorder(folder)
    marks.iteration()
    assert free(folder, "gpu")
    with marks.stage("gpu"):
        assert not free(folder, "gpu")
        with marks.stage("network"):
            assert free(folder, "gpu")
            assert not free(folder, "network")
            with marks.stage("network"):
                assert not free(folder, "network")
            assert not free(folder, "network")
        assert not free(folder, "gpu")
        assert free(folder, "network")
    assert free(folder, "gpu")


def test_two_that_nest_in_opposite_order_do_not_deadlock(group: Group) -> None:
    script = MEMBER.replace(
        "            time.sleep(float(ms) / 1_000)\n",
        "            time.sleep(0.002)\n            with stage('cpu' if resource == 'gpu' else 'gpu'):\n                time.sleep(0.002)\n",
    )
    for name, plan in (("a", "gpu:1"), ("b", "cpu:1")):
        command = [sys.executable, "-c", script, name, "1.5", plan]
        group.members[name] = subprocess.Popen(command, cwd=group.folder)
    group.go()
    assert all(count > 50 and not missed for count, _, missed in group.end().values())


@pytest.mark.parametrize("seed", range(3))
def test_whatever_members_nest_nobody_meets_anybody_or_waits_in_vain(folder: Path, seed: int) -> None:
    """Four members that enter random stages inside of random others, on two resources, so that they want each other's all the time."""
    held: dict[int, str] = {}
    met: list[tuple[str, int]] = []
    done: dict[str, int] = {}
    ends = time.monotonic() + 1.0

    def member(name: str) -> None:
        chance, found = random.Random(f"{seed} {name}"), group_of(folder)

        def enter(index: int, depth: int, outer: int | None) -> None:
            if outer is not None and held.pop(outer, name) != name:
                met.append((name, outer))
            found.change(index)
            if held.setdefault(index, name) != name:
                met.append((name, index))
            time.sleep(chance.random() / 1_000)
            if depth < 3 and chance.random() < 0.5:
                enter(chance.randrange(2), depth + 1, index)
            if held.pop(index, name) != name:
                met.append((name, index))
            found.change(outer)
            if outer is not None and held.setdefault(outer, name) != name:
                met.append((name, outer))

        while time.monotonic() < ends:
            enter(chance.randrange(2), 0, None)
            done[name] = done.get(name, 0) + 1
        assert found.waits.missed == 0

    threads = [threading.Thread(target=member, args=(name,), daemon=True) for name in "abcd"]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
        assert not one.is_alive(), "a deadlock"
    assert met == []
    assert min(done.values()) > 5


def test_a_turn_is_left_by_what_raises(folder: Path) -> None:
    marks = recorder(folder)
    marks.iteration()
    with pytest.raises(ZeroDivisionError), marks.stage("gpu"):
        raise ZeroDivisionError
    assert free(folder, "gpu")


def test_what_takes_long_inside_of_a_stage_may_give_its_turn_back(folder: Path) -> None:
    """A save, where `progress` was called inside of a block."""
    marks = recorder(folder)
    marks.iteration()
    with marks.stage("gpu"):
        marks.yield_turn()
        assert free(folder, "gpu")
    with marks.stage("gpu"):
        assert not free(folder, "gpu")


def test_a_forked_child_has_no_turn_and_takes_none_away(folder: Path) -> None:
    """A loader's process: the parent holds its stage, whatever the child enters; and is dead, once it is dead."""
    marks = recorder(folder)
    marks.iteration()
    with marks.stage("gpu"):
        child = os.fork()
        if not child:
            marks.forked()
            with marks.stage("gpu"), marks.stage("cpu"):
                time.sleep(0.2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not free(folder, "gpu")
    assert free(folder, "gpu")


def test_waiting_is_no_part_of_a_stage_profile(folder: Path) -> None:
    """The same iteration, with each stage waited for: the profile is that of running alone."""
    lines: list[str] = []
    clock = [100.0]
    found = group_of(folder)
    marks = Recorder(
        clock=lambda: clock[0], write=lambda line: bool(lines.append(line)) or True, join=lambda: found
    )
    change = found.change

    def waits(index: int | None) -> None:
        clock[0] += 0.07 if index is not None else 0.0
        change(index)

    found.change = waits  # type: ignore[method-assign]
    for _ in range(30):
        marks.iteration()
        with marks.stage("storage"):
            clock[0] += 0.01
            with marks.stage("gpu"):
                clock[0] += 0.03
        clock[0] += 0.005
    (line,) = lines
    profile = json.loads(line)["stages"]
    per_iteration = {tuple(used): lasted / profile["iterations"] for lasted, *used in profile["samples"]}
    assert per_iteration == {
        (1, 0, 0, 0): pytest.approx(10.0),
        (0, 0, 1, 0): pytest.approx(30.0),
        (0, 0, 0, 0): pytest.approx(5.0),
    }
    assert marks._sums[WAITING] > 0


def test_there_are_no_turns_outside_of_a_group_or_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(turns.GROUP, raising=False)
    assert turns_of_group(STAGES, lambda: False) is None
    monkeypatch.setenv(turns.GROUP, str(tmp_path / "not there"))
    assert turns_of_group(STAGES, lambda: False) is None


def test_turns_go_on_when_no_profile_is_reported_any_more(folder: Path) -> None:
    marks = recorder(folder)
    marks.iteration()
    marks._lines = 16
    for _ in range(60):
        marks.iteration()
        with marks.stage("gpu"):
            assert not free(folder, "gpu")
