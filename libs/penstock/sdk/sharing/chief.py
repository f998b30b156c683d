"""Turns of a gang's other ranks: rank 0 (the chief) takes turns for the gang; ranks on its node enter a stage
after it.

The chief counts its entries into each stage in a file of its group's folder; another rank enters a stage for
the n-th time once the chief has entered it n times. All ranks go through the same stages in the same order
(SPMD), so there is no circular wait: the chief's entry for which a rank waits comes before anything that the
chief still needs from that rank. A script whose ranks differ loses one bounded wait; then its ranks no longer
follow.

They do so only while the chief has had to wait for turns recently: where a job has its GPUs alone, its ranks
are not slowed. The chief holds a lock on its file, by which others detect that it is alive. Ranks on other
nodes have no such file, and run ahead up to their next collective; so do workers with parameter servers,
which do not wait for each other.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

with suppress(ImportError):  # `LOCKS` records it
    import fcntl

from penstock.sdk.sharing.turns import (
    FIRST_LOOK_S,
    GROUP,
    LAST_LOOK_S,
    LOCKS,
    MAX_HOLDERS,
    MAX_WAIT_S,
    Changes,
    Turns,
    Waits,
)

SUFFIX = ".chief"
COUNT = struct.Struct("=Q")
COMPANY_S = 10.0  # after a wait for a turn, other jobs count as present for so long


def _path(folder: str) -> str:
    """The file of the chief of this attempt of this job."""
    job, attempt = os.environ.get("PENSTOCK_JOB_ID", "job"), os.environ.get("PENSTOCK_ATTEMPT", "1")
    return os.path.join(folder, f"{job.replace('/', '_')}-{attempt}{SUFFIX}")


def in_step() -> bool:
    """Whether this process is one of several workers that wait for each other."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not _has_servers()


def _has_servers() -> bool:
    text = os.environ.get("PENSTOCK_PEERS", "")
    with suppress(OSError):
        if path := os.environ.get("PENSTOCK_PEERS_FILE"):
            with open(path, encoding="utf-8") as file:
                text = file.read()
    return '"ps"' in text


class LeadingTurns:
    """Turns of the chief: takes them as `turns` does, and publishes its entries to the other ranks."""

    def __init__(
        self, folder: str, turns: Turns, resources: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Removes files of dead chiefs. `clock`: monotonic seconds. Raises `OSError`."""
        for path in _chiefs(folder):
            with suppress(OSError):
                _remove_if_dead(path)
        self._turns = turns
        self._clock = clock
        self._counts = [0] * resources
        self._company = False
        self._company_until_s = 0.0
        self._path = _path(folder)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(self._file, bytes(COUNT.size * (resources + 1)), 0)

    def change(self, index: int | None) -> None:
        """As `Turns.change`."""
        before, now_s = self._turns.waits, self._clock()
        self._turns.change(index)
        if self._turns.waits != before:
            self._company_until_s = now_s + COMPANY_S
        company, self._company = self._company, now_s < self._company_until_s
        with suppress(OSError):
            if self._company != company:
                self._write(len(self._counts), int(self._company))
            if index is not None:
                self._counts[index] += 1
                self._write(index, self._counts[index])

    @property
    def waits(self) -> Waits:
        return self._turns.waits

    def close(self) -> None:
        """For a forked child, which would otherwise hold the lock after the chief's death."""
        self._turns.close()
        os.close(self._file)

    def _write(self, place: int, value: int) -> None:
        os.pwrite(self._file, COUNT.pack(value), COUNT.size * place)


class FollowedTurns:
    """Turns of another rank. `leaving`: whether this process is about to end. `clock`: monotonic seconds."""

    def __init__(
        self,
        folder: str,
        resources: int,
        leaving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = _path(folder)
        self._leaving = leaving
        self._clock = clock
        self._changes = Changes()
        self._counts = [0] * resources
        self._all = struct.Struct(f"={resources + 1}Q")
        self._file = -1
        self._follows = True
        self._waited_s = 0.0
        self._missed = 0

    def change(self, index: int | None) -> None:
        """Waits until the chief has entered this stage as often as this rank. Never fails."""
        if index is None or not self._follows:
            return
        self._counts[index] += 1
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            if not self._entered(index):
                self._wait(index)
        except FileNotFoundError:  # the chief is on another node, or has not started
            return
        except OSError:
            self._follows = False

    @property
    def waits(self) -> Waits:
        return Waits(self._waited_s, self._missed)

    def close(self) -> None:
        """For a forked child."""
        self._changes.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wait(self, index: int) -> None:
        began_s = self._clock()
        ends_s, delay_s = began_s + MAX_HOLDERS * MAX_WAIT_S, FIRST_LOOK_S
        self._changes.watch(self._path)
        try:
            while not self._entered(index) and not self._leaving():
                if self._clock() >= ends_s or self._dead():
                    self._follows = False
                    self._missed += 1
                    return
                delay_s = FIRST_LOOK_S if self._changes.wait(delay_s) else min(2 * delay_s, LAST_LOOK_S)
        finally:
            self._waited_s += self._clock() - began_s

    def _entered(self, index: int) -> bool:
        """Whether the chief has entered the stage as often, or no other job is present."""
        found = os.pread(self._file, self._all.size, 0)
        if len(found) < self._all.size:  # the chief has not written it yet
            return True
        *entered, company = self._all.unpack(found)
        return not company or entered[index] >= self._counts[index]

    def _dead(self) -> bool:
        """Whether the chief no longer holds its lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


def _chiefs(folder: str) -> Iterator[str]:
    return (entry.path for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))


def _remove_if_dead(path: str) -> None:
    """Removes a dead chief's file. Raises `OSError` where the chief is alive."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(file)


def followed_turns(resources: int, leaving: Callable[[], bool]) -> FollowedTurns | None:
    """Turns of this process, which is not rank 0; None: the job is in no group."""
    folder = os.environ.get(GROUP)
    return FollowedTurns(folder, resources, leaving) if folder and LOCKS else None


def leading_turns(turns: Turns, resources: int) -> Turns | LeadingTurns:
    """Turns of this process, which is rank 0 of several; where its file cannot be opened, the other ranks do
    not follow."""
    try:
        return LeadingTurns(os.environ[GROUP], turns, resources)
    except OSError:
        return turns
