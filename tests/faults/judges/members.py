"""Random members of a group that take turns at one resource, some of which are stuck, stopped in line, or
gone.

Rule `turns`: members that were never stuck, and whose turns are short, never hold them together; no wait is
longer than its bound; and a stage that runs beside a holder is counted.
"""

import fcntl
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from penstock.sdk.sharing import turns
from penstock.sdk.sharing.turns import MAX_HOLDERS, MAX_WAIT_S, PATIENCE_S, Turn
from tests.faults.judges.cell_rules import Broken
from tests.unit.sdk.turns.played_changes import Played, numbered

STEPS = 25
LONGEST = 0.45
"""Part of `MAX_WAIT_S` for which a turn is held at most: who holds turns for longer than half of that time is
waited for less."""
LATEST_S = MAX_HOLDERS * MAX_WAIT_S + 1.0


class Members:
    """Four members; the first may be stuck in its stage for long."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.played = Played()
        self.stopped, *self.turns = (
            numbered(Turn(str(folder / "gpu"), self.played, clock=self.played.clock)) for _ in range(5)
        )
        self.stuck: int | None = None
        self.slow: set[int] = set()
        """Those that were stuck: others wait less for them."""
        self.since_s = 0.0
        self.gave_up: dict[int, float] = {}

    def play(self) -> None:
        """Raises `Broken`."""
        for _ in range(STEPS):
            self.played._next.clear()
            if self.stuck is None and self.rng.random() < 0.3:
                self._gets_stuck()
            elif self.stuck is not None and self.rng.random() < 0.1:
                self.turns[self.stuck].leave()
                self.stuck = None
            self._stage()

    def _gets_stuck(self) -> None:
        number = int(self.rng.integers(4))
        if self.turns[number].take():
            self.stuck, self.since_s, self.gave_up = number, self.played.now_s, {}
            self.slow.add(number)

    def _stage(self) -> None:
        """One member holds a turn for a while, as another asks; a third may be stopped in line."""
        free = [number for number in range(4) if number != self.stuck]
        first, second = (free[int(at)] for at in self.rng.permutation(len(free))[:2])
        holder, waits = self.turns[first], self.turns[second]
        stops = self.rng.random() < 0.3
        self._takes(first)
        held_s = float(self.rng.uniform(0.1, LONGEST)) * MAX_WAIT_S
        left = [False]

        def leave() -> None:
            left[0] = True
            holder.leave()

        place = self.stopped._stand_in_line() if stops else 0
        self.played.after(held_s, leave)
        began_s = self.played.now_s
        self._takes(second)
        if holder._held and waits._held and not left[0] and first not in self.slow:
            raise Broken(f"turns: members {first} and {second} are in their stages together")
        if self.stuck is None and left[0]:
            late_s = self.played.now_s - began_s - held_s
            if late_s > turns.LAST_LOOK_S + stops * (PATIENCE_S + turns.LAST_LOOK_S):
                raise Broken(f"turns: member {second} enters {late_s:g} s after the turn was free")
        if stops:
            self.stopped._lock(fcntl.F_UNLCK, place, 1)
        for turn in (holder, waits):
            turn.leave()

    def _takes(self, number: int) -> None:
        """A member takes its turn, within the bound; once it has given up a stuck one, at once."""
        turn, began_s = self.turns[number], self.played.now_s
        missed = turn.missed
        knows = number in self.gave_up
        beside = self.stuck is not None
        holders = sum(bool(other._held) for at, other in enumerate(self.turns) if at != number)
        took = turn.take()
        waited_s = self.played.now_s - began_s
        if waited_s > LATEST_S:
            raise Broken(f"turns: member {number} waits {waited_s:g} s")
        if beside:
            self.gave_up[number] = self.played.now_s
            if not took:
                raise Broken(f"turns: member {number} takes no turn beside one that is stuck")
            if turn.missed == missed:
                raise Broken(f"turns: member {number} enters beside a holder, and is not counted")
            if knows and holders < 2 and waited_s > PATIENCE_S + 2 * turns.LAST_LOOK_S:
                raise Broken(f"turns: member {number} waits {waited_s:g} s for one that it has given up")

    def close(self) -> None:
        for turn in (*self.turns, self.stopped):
            turn.close()


def play(seed: int) -> None:
    """Raises `Broken`."""
    with TemporaryDirectory() as folder:
        members = Members(seed, Path(folder))
        try:
            members.play()
        finally:
            members.close()
