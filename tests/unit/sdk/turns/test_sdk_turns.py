"""Turns of a group by the kernel's locks: nobody is in a stage beside another, nobody starves or deadlocks,
and whoever dies, hangs or is stopped costs the others little."""

import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.sdk.sharing import turns
from penstock.sdk.sharing.turns import Changes, Turn, Turns, turns_of_group
from penstock.sdk.stages import STAGES, WAITING, Recorder
from tests.support.waiting import wait_until
from tests.unit.sdk.turns.members import ENDLESS, MEMBER, ROUNDS, Group
from tests.unit.sdk.turns.played_changes import Played, in_line, numbered


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a group, with a reader that takes no line."""
    (tmp_path / "group").mkdir()
    monkeypatch.setenv(turns.GROUP, str(tmp_path / "group"))
    monkeypatch.setenv("PENSTOCK_PHASE_FILE", os.devnull)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture
def group(folder: Path) -> Iterator[Group]:
    found = Group(folder)
    yield found
    for member in found.members.values():
        with suppress(ProcessLookupError):
            member.kill()
        member.wait()


@pytest.fixture
def played() -> Played:
    return Played()


def turn(
    folder: Path,
    changes: Changes | None = None,
    name: str = "gpu",
    leaving: Callable[[], bool] = lambda: False,
) -> Turn:
    """Of a further member: locks belong to the open file, not to the process. Its time is that of `changes`,
    where that is played."""
    clock = {"clock": changes.clock} if isinstance(changes, Played) else {}
    return numbered(Turn(str(folder / "group" / name), changes or Changes(), leaving, **clock))


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_nobody_is_in_a_stage_beside_another_and_all_come_to_their_end(group: Group) -> None:
    """Four members of which each wants the same resource again at once."""
    for name in "abcd":
        group.start(name, "gpu:2")
    group.go()
    done = group.end()
    held = group.turns()["gpu"]
    assert all(left <= entered for (_, left, _), (entered, _, _) in pairwise(held))
    assert [len([1 for *_, name in held if name == one]) for one in "abcd"] == [ROUNDS] * 4
    assert not sum(missed for _, missed in done.values())


def test_who_leaves_a_stage_stands_in_line_behind_all_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants the resource again at once: at a plain lock it would always be first, and the others would
    starve. Each is woken by the one before it, and none by looking."""
    for bound in ("PATIENCE_S", "MAX_WAIT_S", "FIRST_LOOK_S", "LAST_LOOK_S"):
        monkeypatch.setattr(turns, bound, 3_600.0)
    entered: list[str] = []
    members = {name: turn(folder) for name in "abcd"}
    outside = turn(folder)

    def enters(name: str) -> None:
        assert members[name].take()
        entered.append(name)
        if name != "a" or entered.count("a") == 2:
            members[name].leave()

    enters("a")
    waiting = []
    for number, name in enumerate("bcd", 1):
        waiting.append(in_background(lambda name=name: enters(name)))
        wait_until(lambda number=number: in_line(outside) == number, f"{name} in line")
    members["a"].leave()
    enters("a")
    for thread in waiting:
        thread.join()
    assert entered == ["a", "b", "c", "d", "a"]


def test_who_needs_different_resources_waits_for_nobody(group: Group) -> None:
    for name, resource in zip("abcd", STAGES, strict=True):
        group.start(name, f"{resource}:5")
    group.go()
    assert set(group.end().values()) == {(0.0, 0)}


def test_the_death_of_a_holder_frees_its_turn(group: Group) -> None:
    """`a` is killed in the middle of an endless stage, for which `b` would wait an hour."""
    outside = turn(group.folder)
    group.start("a", ENDLESS)
    group.go()
    group.until(lambda: len(group.lines("+")) == 1, "a in its stage")
    group.start("b", "gpu:1")
    group.until(lambda: in_line(outside), "b in line")
    assert len(group.lines("+")) == 1, "b waits"
    group.members.pop("a").kill()
    assert [missed for _, missed in group.end().values()] == [0]


def test_a_death_that_is_not_reported_is_seen_at_the_next_look(folder: Path, played: Played) -> None:
    a, b = turn(folder), turn(folder, played)
    assert a.take()
    played.after(5.0, a.close, is_reported=False)
    assert b.take()
    assert 5.0 <= b.waited_s <= 5.0 + turns.LAST_LOOK_S < 6.0


def test_who_never_leaves_a_stage_costs_the_others_the_bound_once(group: Group) -> None:
    """They go on beside it, without waiting for it again, and count how often."""
    group.start("a", ENDLESS)
    group.go()
    group.until(lambda: len(group.lines("+")) == 1, "a in its stage")
    for name in "bc":
        group.start(name, "gpu:2", BOUND="0.3")
    hung = group.members.pop("a")
    done = group.end()
    hung.kill()
    hung.wait()
    for waited_s, missed in done.values():
        assert missed == ROUNDS
        assert waited_s >= 0.3


def test_a_holder_that_was_given_up_is_waited_for_again_once_it_has_left(
    folder: Path, played: Played
) -> None:
    a, b = turn(folder), turn(folder, played)
    assert a.take()
    assert b.take(), "beside a"
    assert b.missed == 1
    assert turns.MAX_WAIT_S <= b.waited_s <= turns.MAX_WAIT_S + turns.LAST_LOOK_S + turns.PATIENCE_S
    before_s = b.waited_s
    b.leave()
    assert b.take()
    assert (b.waited_s, b.missed) == (before_s, 2)
    b.leave()
    a.leave()
    assert b.take()
    b.leave()
    assert a.take()
    played.after(turns.MAX_WAIT_S / 2, a.leave)
    assert b.take(), "another turn of the same member"
    assert b.missed == 2


def test_a_wait_is_bounded_per_holder(folder: Path, played: Played) -> None:
    """Two holders, each of them within the bound, together beyond it."""
    a, b, c = turn(folder), turn(folder), turn(folder, played)
    assert a.take()
    place = b._stand_in_line()

    def next_one() -> None:
        a.leave()
        assert b._hold(place)
        b._lock(fcntl.F_UNLCK, place, 1)

    played.after(0.7 * turns.MAX_WAIT_S, next_one)
    played.after(1.4 * turns.MAX_WAIT_S, b.leave)
    assert c.take()
    assert c.missed == 0
    assert c.waited_s == pytest.approx(1.4 * turns.MAX_WAIT_S)


def test_who_is_stopped_in_line_is_passed(folder: Path, played: Played) -> None:
    """`b` stands in line for what `a` has, and its process is stopped (a frozen cgroup): the turn is not kept
    for it, and the next one costs nothing."""
    a, b, c = turn(folder), turn(folder), turn(folder, played)
    assert a.take()
    b._stand_in_line()
    played.after(0.05, a.leave)
    assert c.take()
    waited_s = c.waited_s
    assert 0.05 + turns.PATIENCE_S <= waited_s <= 0.05 + turns.PATIENCE_S + turns.LAST_LOOK_S
    c.leave()
    assert c.take()
    assert (c.waited_s, c.missed) == (waited_s, 0)


def test_who_is_to_save_and_end_waits_for_nobody(folder: Path, played: Played) -> None:
    """SIGTERM in the middle of a wait: the rest of the iteration must fit into the grace."""
    a, asked = turn(folder), threading.Event()
    b = turn(folder, played, leaving=asked.is_set)
    assert a.take()
    played.after(0.1, asked.set, is_reported=False)
    assert not b.take()
    assert 0.1 <= b.waited_s <= 0.1 + turns.LAST_LOOK_S
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
    assert c.take()
    assert c.waited_s == 0.0


def test_without_inotify_turns_are_taken_by_looking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's instances are used up."""
    a, changes, looks = turn(folder), Changes(), []
    changes.close()
    b = Turn(str(folder / "group" / "gpu"), changes)
    assert a.take()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 50:
            a.leave()

    monkeypatch.setattr(
        turns, "time", SimpleNamespace(sleep=sleep, monotonic_ns=time.monotonic_ns)
    )  # clock: places in line are numbers of it
    assert b.take()
    assert len(looks) == 50
    assert max(looks) <= turns.POLL_S


def recorder(folder: Path, lines: list[str] | None = None) -> Recorder:
    found: list[str] = [] if lines is None else lines
    return Recorder(write=lambda line: bool(found.append(line)) or True, join=lambda: group_of(folder))


def group_of(folder: Path) -> Turns:
    return Turns(str(folder / "group"), STAGES, lambda: False)


def free(folder: Path, name: str) -> bool:
    other = turn(folder, name=name)
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
        "            time.sleep(0.002)\n            with stage('cpu' if resource == 'gpu' else 'gpu'):\n     "
        "           time.sleep(0.002)\n",
    )
    for name, plan in (("a", "gpu:1"), ("b", "cpu:1")):
        group.start(name, plan, script=script)
    group.go()
    assert [missed for _, missed in group.end().values()] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_members_nest_nobody_meets_anybody_or_waits_in_vain(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Four members that enter random stages inside of random others, on two resources, so that they want each
    other's all the time."""
    monkeypatch.setattr(turns, "MAX_WAIT_S", 3_600.0)
    held: dict[int, str] = {}
    met: list[tuple[str, int]] = []
    missed: dict[str, int] = {}

    def member(name: str) -> None:
        chance, found = random.Random(f"{seed} {name}"), group_of(folder)

        def enter(index: int, depth: int, outer: int | None) -> None:
            if outer is not None and held.pop(outer, name) != name:
                met.append((name, outer))
            found.change(index)
            if held.setdefault(index, name) != name:
                met.append((name, index))
            time.sleep(chance.random() / 1_000)  # clock: as long as the stage takes
            if depth < 3 and chance.random() < 0.5:
                enter(chance.randrange(2), depth + 1, index)
            if held.pop(index, name) != name:
                met.append((name, index))
            found.change(outer)
            if outer is not None and held.setdefault(outer, name) != name:
                met.append((name, outer))

        for _ in range(ROUNDS):
            enter(chance.randrange(2), 0, None)
        missed[name] = found.waits.missed

    threads = [threading.Thread(target=member, args=(name,), daemon=True) for name in "abcd"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert met == []
    assert missed == dict.fromkeys("abcd", 0)


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
    """A loader's process: the parent holds its stage, whatever the child enters; and is dead, once it is
    dead."""
    marks = recorder(folder)
    marks.iteration()
    with marks.stage("gpu"):
        child = os.fork()
        if not child:
            marks.forked()
            with marks.stage("gpu"), marks.stage("cpu"):
                pass
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
