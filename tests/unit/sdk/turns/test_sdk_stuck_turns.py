"""Turns of a group beside a holder that never leaves, or leaves late again and again: the others go on one
after the other, and whoever goes on again is kept apart from them."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest

from penstock.sdk.sharing import turns
from penstock.sdk.sharing.turns import Turn
from tests.unit.sdk.turns.members import ENDLESS, MEMBER, Group
from tests.unit.sdk.turns.played_changes import Played, numbered
from tests.unit.sdk.turns.test_sdk_turns import folder, group

__all__ = ["folder", "group"]  # fixtures

PLACES = count(1)
"""Numbers of bytes by which a turn is held: no two holders have the same."""
ROUNDS = 40
BOUND = "0.3"
"""Seconds after which members of a test give up a holder; none of the others holds a turn nearly so long."""

GATED = MEMBER.replace(
    "            time.sleep(float(ms) / 1_000)\n",
    "            while not os.path.exists('on'):\n                time.sleep(0.001)\n",
)
"""A member whose first stage ends when the file `on` is there."""
FORKS = MEMBER.replace(
    "            time.sleep(float(ms) / 1_000)\n",
    """            import ctypes
            if not (child := ctypes.CDLL(None).fork()):
                time.sleep(3_600)
            says("child", child)
            os.kill(os.getpid(), 9)
""",
)
"""A member whose child, forked by a library, keeps its files open, and which is killed in its stage."""


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def children(group: Group) -> Iterator[Callable[[], list[int]]]:
    """Process ids of forked children; they are killed at the end."""

    def found() -> list[int]:
        return [int(pid) for [pid] in group.lines("child")]

    yield found
    for pid in found():
        os.kill(pid, signal.SIGKILL)


def turn(folder: Path, played: Played | None = None) -> Turn:
    """Of a further member: locks belong to the open file, not to the process."""
    played = played or Played()
    return numbered(Turn(str(folder / "gpu"), played, clock=played.clock))


def exclusive(held: list[tuple[float, float, str]]) -> bool:
    """Whether each entered after the one before had left."""
    return all(left <= entered for (_, left, _), (entered, _, _) in pairwise(held))


def test_a_stopped_holder_is_passed_by_the_others_and_joins_them_again(group: Group) -> None:
    """An operator stops a process in its stage. Three others go on for many rounds, never two at a time; when
    the stopped one goes on it takes turns with who is there as before."""
    group.start("a", "gpu:2", rounds=ROUNDS, script=GATED)
    group.go()
    group.until(lambda: len(group.lines("+")) == 1, "a in its stage")
    stopped = group.members.pop("a")
    stopped.send_signal(signal.SIGSTOP)
    for name in "bcd":
        group.start(name, "gpu:2", rounds=ROUNDS, BOUND=BOUND)
    done = group.end()
    held = group.turns()["gpu"]
    assert [len([1 for *_, name in held if name == one]) for one in "bcd"] == [ROUNDS] * 3
    assert exclusive(held)
    assert {missed for _, missed in done.values()} == {ROUNDS}, "each ran beside a, and beside nobody else"
    (group.folder / "on").touch()
    stopped.send_signal(signal.SIGCONT)
    group.members = {"a": stopped}
    for name in "ef":
        group.start(name, "gpu:2", rounds=ROUNDS)
    done = group.end()
    assert {done[name][1] for name in "aef"} == {0}
    assert exclusive([one for one in group.turns()["gpu"] if one != group.turns()["gpu"][0]])


def test_a_forked_child_that_keeps_the_file_open_ends_no_exclusion(
    group: Group, children: Callable[[], list[int]]
) -> None:
    """A library has forked a helper, which lives on when its parent is killed in a stage: the lock is held
    for ever, and the others take turns without that one."""
    group.start("a", ENDLESS, script=FORKS, rounds=1)
    group.until(lambda: group.lines("ready"), "a")
    (group.folder / "go").touch()
    assert group.members.pop("a").wait() == -signal.SIGKILL
    assert children()
    for name in "bcd":
        group.start(name, "gpu:2", rounds=ROUNDS, BOUND=BOUND)
    done = group.end()
    assert exclusive(group.turns()["gpu"])
    assert {missed for _, missed in done.values()} == {ROUNDS}


def test_a_stuck_holder_ends_no_exclusion_among_the_rest(tmp_path: Path, played: Played) -> None:
    """`a` is stopped in its stage, or its forked child keeps the file open. `b` and `c` give it up, and take
    turns with each other."""
    a, b, c = turn(tmp_path), turn(tmp_path, played), turn(tmp_path, played)
    assert a.take()
    assert b.take()
    began_s = played.now_s
    played.after(turns.MAX_WAIT_S / 2, lambda: (b.leave(), b._hold(next(PLACES))))
    played.after(1.2 * turns.MAX_WAIT_S, b.leave)
    assert c.take()
    assert played.now_s - began_s >= 1.2 * turns.MAX_WAIT_S, "c has waited for b, too, twice"
    assert (b.missed, c.missed) == (2, 1)
    played.after(turns.MAX_WAIT_S / 2, c.leave)
    assert b.take(), "c is waited for, a is not"


def test_a_stuck_holder_that_goes_on_is_kept_apart_from_the_rest(tmp_path: Path, played: Played) -> None:
    """Its next stage waits for who took a turn beside it; and who still waits for it waits for that one,
    too."""
    a, b, c = turn(tmp_path, played), turn(tmp_path, played), turn(tmp_path, played)
    assert a.take()
    assert b.take()
    a.leave()
    for other in (a, c):
        assert not other._hold(next(PLACES))
    played.after(turns.MAX_WAIT_S / 2, b.leave)
    assert a.take()
    assert not b._hold(next(PLACES))


def test_who_holds_its_turn_for_nearly_the_bound_again_and_again_is_waited_for_less_and_less(
    tmp_path: Path, played: Played
) -> None:
    """A training computes for 9.9 s and wants the GPU again at once; that of `b` takes a tenth of a second.
    Ever waiting for the other, `b` had 1 % of its speed. Now it soon has nearly all of it, and is still kept
    apart from `c`, who behaves."""
    slow, b, c = turn(tmp_path, played), turn(tmp_path, played), turn(tmp_path, played)
    hold_s, step_s, held = 0.99 * turns.MAX_WAIT_S, 0.1, [0]

    def again() -> None:
        """Until it may, it stands in line."""
        slow.leave()
        if slow._hold(slow._place()):
            held[0] += 1
            played.after(hold_s, again)

    again()
    waited_s = []
    for _ in range(12):
        turn_of_slow, before_s = held[0], b.waited_s
        while held[0] == turn_of_slow:
            assert b.take()
            assert not c._hold(next(PLACES)), "b is in its stage"
            played.wait(step_s)
            b.leave()
            if not slow._held:
                again()
        waited_s.append(b.waited_s - before_s)
    assert waited_s[0] > 0.9 * hold_s
    assert max(waited_s[-3:]) <= 2 * (turns.PATIENCE_S + turns.LAST_LOOK_S)
    assert c.take()
    before_s = b.waited_s
    played.after(turns.MAX_WAIT_S / 3, c.leave)
    assert b.take()
    assert b.waited_s - before_s > 0.3 * turns.MAX_WAIT_S, "c is waited for as ever"


def test_who_becomes_quick_again_is_waited_for_again(tmp_path: Path, played: Played) -> None:
    """Its evaluation is over, and its stages are short again: nobody enters one beside it any more."""
    slow, b = turn(tmp_path, played), turn(tmp_path, played)
    for held_s in [*[0.9 * turns.MAX_WAIT_S] * 6, *[0.1] * 8]:
        assert slow.take()
        played.after(held_s, slow.leave)
        assert b.take()
        while slow._held:
            played.wait(turns.LAST_LOOK_S)
        b.leave()
    missed = b.missed
    assert missed
    assert slow.take()
    played.after(0.4 * turns.MAX_WAIT_S, slow.leave)
    assert b.take()
    assert b.missed == missed


def test_where_all_others_are_stuck_nobody_waits_for_a_lane(tmp_path: Path, played: Played) -> None:
    """Each lane has a holder that never leaves, such as the children of a script that crashed several times:
    a stage then runs without a turn at once, and not after half a minute each time."""
    stuck, b = [turn(tmp_path) for _ in range(turns.LANES)], turn(tmp_path, played)
    for lane, other in enumerate(stuck):
        assert other._lock(1, turns.HELD + lane * turns.LANE, next(PLACES))
    assert not b.take()
    before_s, missed = b.waited_s, b.missed
    assert not b.take()
    assert b.waited_s - before_s <= turns.LAST_LOOK_S
    assert b.missed == missed + 1
