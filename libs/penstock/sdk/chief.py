"""Turns of a gang's other ranks: those on the chief's node enter a stage when rank 0 has, whose turn it is for all of the gang.

The chief counts its entries into each stage in a file of its group's folder; another rank enters a stage for the n-th time once the chief has entered
it n times. All ranks go through the same stages in the same order (SPMD), so nobody waits for somebody who waits for him: what a rank waits
for comes before what the chief still waits for from it. A script in which ranks differ loses one bounded wait, then its ranks follow no more.

They do so only while the chief has had to wait for turns of late: where a job has its GPUs alone, its ranks are not slowed. The chief holds a
lock on its file, by which others see that it lives. Ranks on other nodes have no such file, and run ahead up to their next collective; so do
workers with parameter servers, which do not wait for each other.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

with suppress(ImportError):  # `LOCKS` says so
    import fcntl

from penstock.sdk.turns import (
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
COMPANY_S = 10.0  # a chief that has waited for a turn has company for so long


def _path(folder: str) -> str:
    """Of the chief of this attempt of this job."""
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
    """The chief's: takes turns as `turns` does, and lets the others know."""

    def __init__(
        self, folder: str, turns: Turns, resources: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Removes what dead chiefs have left. `clock`: monotonic seconds. Raises `OSError`."""
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
        """In a forked child, which would else keep the lock when the chief is dead."""
        self._turns.close()
        os.close(self._file)

    def _write(self, place: int, value: int) -> None:
        os.pwrite(self._file, COUNT.pack(value), COUNT.size * place)


class FollowedTurns:
    """Another rank's. `leaving`: whether this process is about to end. `clock`: monotonic seconds."""

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
        """Waits until the chief has entered this stage as often. Never fails."""
        if index is None or not self._follows:
            return
        self._counts[index] += 1
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            if not self._entered(index):
                self._wait(index)
        except FileNotFoundError:  # the chief is on another node, or not there yet
            return
        except OSError:
            self._follows = False

    @property
    def waits(self) -> Waits:
        return Waits(self._waited_s, self._missed)

    def close(self) -> None:
        """In a forked child."""
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
        """Or the chief has no company."""
        found = os.pread(self._file, self._all.size, 0)
        if len(found) < self._all.size:  # it is about to write it
            return True
        *entered, company = self._all.unpack(found)
        return not company or entered[index] >= self._counts[index]

    def _dead(self) -> bool:
        """Whether the chief does not hold its lock any more."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


def _chiefs(folder: str) -> Iterator[str]:
    return (entry.path for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))


def _remove_if_dead(path: str) -> None:
    """Raises `OSError` where it lives."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(file)


def followed_turns(resources: int, leaving: Callable[[], bool]) -> FollowedTurns | None:
    """Of this process, which is not rank 0; None: it is in no group's folder."""
    folder = os.environ.get(GROUP)
    return FollowedTurns(folder, resources, leaving) if folder and LOCKS else None


def leading_turns(turns: Turns, resources: int) -> Turns | LeadingTurns:
    """Of this process, which is rank 0 of several; without others where its file cannot be had."""
    try:
        return LeadingTurns(os.environ[GROUP], turns, resources)
    except OSError:
        return turns
