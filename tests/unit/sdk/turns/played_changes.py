"""Turns of a group in a test: time that goes on only while somebody waits, and who stands in line."""

import fcntl
import os
import struct
from collections.abc import Callable
from itertools import count

from penstock.sdk.sharing import turns
from penstock.sdk.sharing.turns import Changes, Turn

_numbers = count(1)


def numbered(turn: Turn) -> Turn:
    """The same, with the next number in place of a drawn one: members that stand in line within one moment
    stand there in the order in which the test made them."""
    turn._number = next(_numbers) % turns.NUMBERS
    return turn


class Played(Changes):
    """A clock that goes on only while somebody waits, up to the next thing that happens."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self._next: list[tuple[float, Callable[[], object], bool]] = []

    def clock(self) -> float:
        return self.now_s

    def after(self, seconds: float, happens: Callable[[], object], *, is_reported: bool = True) -> None:
        """What others do when so much time has passed; `is_reported`: by inotify."""
        self._next.append((self.now_s + seconds, happens, is_reported))
        self._next.sort(key=lambda one: one[0])

    def watch(self, path: str) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        if not self._next or self._next[0][0] > self.now_s + seconds:
            self.now_s += seconds
            return False
        self.now_s, happens, is_reported = self._next.pop(0)
        happens()
        return is_reported


def in_line(outside: Turn) -> int:
    """How many stand in line, as a further member finds it: each locks one byte."""
    count, start = 0, 1
    while found := place_in_line(outside, start):
        count, start = count + 1, found + 1
    return count


def place_in_line(outside: Turn, start: int) -> int:
    """The first place in line from this one on; 0: there is none."""
    asked = struct.pack(turns.FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, turns.HELD - start, 0)
    found = fcntl.fcntl(outside._descriptor, fcntl.F_OFD_GETLK, asked)
    kind, _, place, _, _ = struct.unpack(turns.FLOCK, found)
    return 0 if kind == fcntl.F_UNLCK else place
