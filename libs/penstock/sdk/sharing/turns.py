"""Fair file locks (first come, first served) for the turns of a group's members: one lock file per resource,
in the folder that PENSTOCK_GROUP names, so that stages of different jobs never use one resource at the same
time. Source: Muri §4.1 (a barrier ends each stage of a group).

Departure: no barrier over all stages. A member waits only for the resource that it needs next, so one that is
faster than predicted goes on.

Locks are the kernel's, on open files (`F_OFD_SETLK` of fcntl(2)): the holder's death frees them, and no
process but the members is needed. A process first waits in line, then holds the turn. It queues by a lock on
one byte, whose offset is its time of arrival in ns since boot, and tests whether any byte before that is
locked: first come, first served, without a counter that a death could leave wrong. The holder locks bytes
from `HELD` on; their number is its place in line, by which others identify it. Nothing is stored in the file.
A wait ends by inotify: a holder that leaves writes a byte, if any process is in line, and the death of a
holder closes its file.

**No deadlock.** A process holds at most one turn, and none while it waits: entering a stage inside of another
gives the outer one's turn back, which is taken again afterwards. So no holder waits for a turn. In a gang
rank 0 alone takes turns, at the node on which the chiefs of all members are, since members of a group are on
the same nodes rank by rank; its other ranks wait for it (`chief`) and hold none.

**No starvation.** Each other member goes before a waiting member at most once. A wait lasts at most
`MAX_WAIT_S` per holder, of `MAX_HOLDERS`. A member that has waited that long for one holder does not wait for
that holder again, and counts the stages that it enters beside it (`missed`). A member that is next in line
and does not take its turn (its process is stopped) is passed after `PATIENCE_S`.

**A stuck holder ends no exclusion among the rest.** Those who have given up a holder (a stopped process, a
forked child that keeps the file open) take their turns in the next of `LANES` ranges of bytes. A turn is held
in one lane, while no lane has a holder that was not given up: so those who still wait for the stuck one, and
the stuck one when it goes on, are kept apart from the rest, too.

**Nor does a slow one keep them waiting.** The last digits of a place in line are the process's own number, so
others recognise its next turn. Each turn of more than half of `MAX_WAIT_S` halves the time for which they
wait for that process, down to `PATIENCE_S`; each shorter one doubles that time again.
"""

import ctypes
import errno
import os
import select
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # a system without fcntl, on which Penstock's node does not run either
    LOCKS = False
else:
    LOCKS = hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8

GROUP = "PENSTOCK_GROUP"
"""Variable: the folder with the lock files of a group; a job with GPUs of its own has it, too."""
# for one holder: longer than a stage of any measured network (Muri §6), as long as a stop's usual grace
MAX_WAIT_S = 10.0
MAX_HOLDERS = 3  # of a group of four (Muri §4), each of the others once
PATIENCE_S = 0.25  # for the next process in line, while the turn is free and it does not take it
FIRST_LOOK_S = (
    0.001  # after a change: the kernel reports that a file was closed just before its locks are gone
)
LAST_LOOK_S = 0.25  # in case a change is not reported
POLL_S = 0.002  # between looks where inotify is not available

HELD = 1 << 62  # offset at which the holder's lock begins, beyond the file's end
LANES = 4  # members of a group (Muri §4): all others may be stuck
LANE = 1 << 59  # bytes; a place in line is below, for 18 years since boot
NUMBERS = 1 << 16  # of processes; places in line are so many ns apart, 65 µs: a wake-up takes longer
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process
IN_MODIFY, IN_CLOSE_WRITE = 0x2, 0x8


class Waits(NamedTuple):
    """Waits for turns since the process began."""

    seconds: float = 0.0
    """Time waited for turns."""
    missed: int = 0
    """Stages entered beside a holder that did not leave in time."""


Holder = tuple[int, int]
"""(lane, number of bytes held): its place in line, which no other has,
and which ends with its process's number."""


class Changes:
    """Wakes a process that waits for a lock file. A thin reader of inotify(7), opened by the first wait;
    without it, looks are `POLL_S` apart."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        """None: not opened yet; -1: not available."""
        self._poll = select.poll()
        self._watched: set[str] = set()

    def watch(self, path: str) -> None:
        """Watches a file; earlier changes are discarded."""
        libc = ctypes.CDLL(None)
        if self._descriptor is None:
            self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor >= 0:
                self._poll.register(self._descriptor, select.POLLIN)
        if self._descriptor >= 0 and path not in self._watched:
            self._watched.add(path)
            if libc.inotify_add_watch(self._descriptor, os.fsencode(path), IN_MODIFY | IN_CLOSE_WRITE) < 0:
                self.close()
        if self._descriptor >= 0 and self._poll.poll(0):
            self._drain()

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for a change; returns whether there was one."""
        if self._descriptor is None or self._descriptor < 0:
            time.sleep(min(seconds, POLL_S))
            return False
        if not self._poll.poll(1_000 * seconds):
            return False
        self._drain()
        return True

    def close(self) -> None:
        """Closes inotify; from now on looks are `POLL_S` apart."""
        if self._descriptor is not None and self._descriptor >= 0:
            self._poll.unregister(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def _drain(self) -> None:
        assert self._descriptor is not None
        with suppress(BlockingIOError):
            os.read(self._descriptor, 4_096)  # some hundred changes; with more, the next wait ends at once


class Turn:
    """The turn at one resource: queued, held, left. For one thread. Raises `OSError` where the file cannot be
    opened.

    `clock`: monotonic seconds. `leaving`: whether this process is about to end, and should not wait.
    """

    def __init__(
        self,
        path: str,
        changes: Changes,
        leaving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._changes = changes
        self._leaving = leaving
        self._clock = clock
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = 0
        """Number of bytes by which it is held; 0: it is not held."""
        self._lane = 0
        """In which it is held."""
        self._number = int.from_bytes(os.urandom(2), "big")
        """Of this process, of `NUMBERS`; drawn, since members may have equal process ids."""
        self._given_up: set[Holder] = set()
        """Those for which it no longer waits."""
        self._seen_s: dict[Holder, float] = {}
        """When each present holder was first seen."""
        self._patience_s: dict[int, float] = {}
        """A process's number → time for which its next turn is waited for;
        others are waited for `MAX_WAIT_S`."""
        self._passed = 0
        """The last place in line for which it no longer waits."""
        self.waited_s = 0.0
        self.missed = 0

    def take(self) -> bool:
        """Waits until it is this process's turn. Returns whether it is. Passes through exceptions of signal
        handlers, and then holds nothing."""
        if not self._in_line(HELD) and self._hold(self._place()):
            return True
        began_s = self._clock()
        self._changes.watch(self._path)
        place = self._stand_in_line()
        try:
            return self._wait(place, began_s)
        finally:
            self._lock(fcntl.F_UNLCK, place, 1)
            self.waited_s += self._clock() - began_s

    def leave(self) -> None:
        """Releases the turn and wakes the next in line; does nothing if it is not held."""
        if not self._held:
            return
        self._lock(fcntl.F_UNLCK, HELD + self._lane * LANE, self._held)
        self._held = 0
        if self._in_line(HELD):
            os.pwrite(self._descriptor, b"\n", 0)

    def close(self) -> None:
        """Closes the file; in a forked child the parent still holds its lock."""
        os.close(self._descriptor)

    def _wait(self, place: int, began_s: float) -> bool:
        """Waits at this place in line. False: it has waited for `MAX_HOLDERS`, or this process leaves."""
        free_s, delay_s = began_s, FIRST_LOOK_S
        while not self._leaving():
            now_s, holders = self._clock(), self._holders()
            if holders:
                free_s = now_s
            free_for_long = now_s - free_s >= PATIENCE_S
            if free_for_long:
                self._passed = place
            if not holders and (free_for_long or not self._in_line(place)) and self._hold(place):
                return True
            no_lane = len(self._given_up) == LANES
            if no_lane or now_s >= began_s + MAX_HOLDERS * MAX_WAIT_S:
                self._given_up |= holders
                self.missed += 1
                return False
            late = {one for one in holders if now_s >= self._seen_s[one] + self._patience_for(one)}
            if late:
                self._given_up |= late
                continue
            delay_s = FIRST_LOOK_S if self._changes.wait(delay_s) else min(2 * delay_s, LAST_LOOK_S)
        return False

    def _stand_in_line(self) -> int:
        place = self._place()
        while not self._lock(fcntl.F_WRLCK, place, 1):
            place += NUMBERS
        return place

    def _place(self) -> int:
        return time.monotonic_ns() // NUMBERS * NUMBERS + self._number

    def _hold(self, length: int) -> bool:
        """In the first free lane. False: none is free, or another process has taken its turn at the same
        time, in another lane."""
        tried = range(LANES if self._given_up else 1)
        lane = next((lane for lane in tried if self._lock(fcntl.F_WRLCK, HELD + lane * LANE, length)), None)
        if lane is None:
            return False
        if self._holders():
            self._lock(fcntl.F_UNLCK, HELD + lane * LANE, length)
            return False
        self._lane, self._held = lane, length
        self.missed += bool(self._given_up)
        return True

    def _holders(self) -> set[Holder]:
        """Other processes that hold a turn and were not given up."""
        found: set[Holder] = set()
        if self._test(HELD, LANES * LANE - 1):
            lanes = {lane: self._test(HELD + lane * LANE, 1) for lane in range(LANES)}
            found = {(lane, length) for lane, length in lanes.items() if length}
        if found or self._seen_s:
            self._look_at(found)
        return found - self._given_up

    def _look_at(self, found: set[Holder]) -> None:
        """Notes who has come, and how long those who have left took at most."""
        now_s = self._clock()
        for left in self._seen_s.keys() - found:
            short = now_s - self._seen_s.pop(left) <= MAX_WAIT_S / 2
            patience_s = self._patience_for(left) * (2 if short else 0.5)
            self._patience_s[left[1] % NUMBERS] = min(MAX_WAIT_S, max(PATIENCE_S, patience_s))
        for holder in found:
            self._seen_s.setdefault(holder, now_s)
        self._given_up &= found

    def _patience_for(self, holder: Holder) -> float:
        return self._patience_s.get(holder[1] % NUMBERS, MAX_WAIT_S)

    def _in_line(self, before: int) -> bool:
        """Whether another process is in line before this place, and not passed."""
        return bool(self._test(self._passed + 1, max(1, before - self._passed - 1)))

    def _lock(self, kind: int, start: int, length: int) -> bool:
        """Sets a lock on a range of bytes. False: another process holds a part of it. Raises `OSError`."""
        try:
            fcntl.fcntl(
                self._descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0)
            )
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _test(self, start: int, length: int) -> int:
        """Length in bytes of a lock that conflicts with this range; 0: none does."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked)
        kind, _, _, length, _ = struct.unpack(FLOCK, found)
        return 0 if kind == fcntl.F_UNLCK else length or 1


class Turns:
    """The turns of one member at all resources; it holds one at most. `folder`: its group's;
    `names`: of the resources."""

    def __init__(self, folder: str, names: tuple[str, ...], leaving: Callable[[], bool]) -> None:
        changes = Changes()
        self._changes = changes
        self._turns = [Turn(os.path.join(folder, name), changes, leaving) for name in names]
        self._now: Turn | None = None

    def change(self, index: int | None) -> None:
        """Releases the held turn, then waits for the turn at the resource with this index; None: takes none.
        Never fails: without a turn the stage runs all the same."""
        with suppress(OSError):
            former, self._now = self._now, None
            if former is not None:
                former.leave()
            if index is not None:
                turn = self._turns[index]
                if turn.take():
                    self._now = turn

    @property
    def waits(self) -> Waits:
        """Waits at all resources together."""
        return Waits(sum(turn.waited_s for turn in self._turns), sum(turn.missed for turn in self._turns))

    def close(self) -> None:
        """For a forked child: the parent still holds its turn."""
        self._changes.close()
        for turn in self._turns:
            turn.close()


def turns_of_group(names: tuple[str, ...], leaving: Callable[[], bool]) -> Turns | None:
    """The turns of this process; None: it is in no group, or files cannot be locked there."""
    folder = os.environ.get(GROUP)
    if not folder or not LOCKS:
        return None
    try:
        return Turns(folder, names, leaving)
    except OSError:
        return None
