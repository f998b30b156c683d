"""Turns of a group beside a holder that never leaves: the others go on one after the other, and whoever goes
on again is kept apart from them."""

from itertools import count
from pathlib import Path

import pytest

from penstock.sdk import turns
from penstock.sdk.turns import Turn
from tests.unit.played_changes import Played

PLACES = count(1)
"""Numbers of bytes by which a turn is held: no two holders have the same."""


@pytest.fixture
def played() -> Played:
    return Played()


def turn(folder: Path, played: Played | None = None) -> Turn:
    """Of a further member: locks belong to the open file, not to the process."""
    played = played or Played()
    return Turn(str(folder / "gpu"), played, clock=played.clock)


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
