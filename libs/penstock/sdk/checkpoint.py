"""Checkpointing of a training script: `checkpoint(save, restore)` restores the last checkpoint and saves when
Penstock asks.

    checkpoint(save, restore)
    for done in range(state.done + 1, 2_001):
        train_one_batch()
        progress(done, 2_000)

Penstock asks by SIGTERM, before it stops the job, or by SIGUSR1. The handlers only set a flag: the save
happens inside the next `progress`, between two iterations. A checkpoint exists whole or not at all: it is
written into a folder of another name, which is renamed when all of it is on the disk; only then the previous
one is removed, and renamed before that, too.
"""

import json
import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import SupportsInt

from penstock.sdk.reporter.lines import leads, write_line
from penstock.sdk.reporter.savers import Registration

FOLDER = "PENSTOCK_CHECKPOINT_DIR"
"""Variable: folder of the job's checkpoints, set for a job with `checkpoint: sdk`."""
RESUME = "PENSTOCK_RESUME"
"""Variable: folder of the checkpoint to restore."""
SAVED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: stopped after a save; try again
NEW, OLD = ".new", ".old"  # names of a partly written and of a partly removed checkpoint
MAX_DONE = 1 << 53
SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))
"""By which Penstock requests a save; fewer on systems on which its node does not run."""
STOPS = tuple(number for number in SIGNALS if number.name == "SIGTERM")
Act = Callable[[str], object]
"""A function that takes the path of a folder."""


class Saver:
    """Checkpoint state of one process. `asked`: the next boundary is to save."""

    def __init__(self, write: Callable[[str], bool] = write_line) -> None:
        self.asked = False
        self._write = write
        self._ends = False
        self._idle = False
        self._save: Act | None = None
        self._folder = ""
        self._watches_forks = False
        self._registration = Registration()
        self._before = threading.local()
        """`mask`: the thread's blocked signals before its fork; threads may fork at the same moment."""

    @property
    def ends(self) -> bool:
        """Whether the script ends at its next boundary, after a save."""
        return self._ends

    def begin(self, save: Act, restore: Act) -> bool:
        """As `checkpoint`."""
        self._arm(save)
        path = os.environ.get(RESUME, "")
        if not path:
            return False
        if not os.path.isdir(path):
            raise FileNotFoundError(
                f"{RESUME}: {path} is not there; unset it to begin anew, or mount the folder that it is in"
            )
        restore(path)
        return True

    def _arm(self, save: Act) -> None:
        folder = os.environ.get(FOLDER, "")
        if not folder:
            if os.environ.get("PENSTOCK_JOB_ID"):
                warnings.warn(
                    "this job has nowhere to save checkpoints; submit it with `checkpoint: sdk`", stacklevel=4
                )
            return
        self._folder = folder
        if leads():
            self._save = save
        try:
            for number in SIGNALS:
                signal.signal(number, self._on_signal)
        except ValueError:
            raise RuntimeError("call checkpoint() in the main thread: it handles signals") from None
        self._register()
        if not self._watches_forks:
            self._watches_forks = True
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._unblock, after_in_child=self._in_child
            )

    def _register(self) -> None:
        """From now on the node asks this process, whatever is in front of it; it tells other ranks to end
        when rank 0 has ended, and not before."""
        if not self._registration.register(saves=self._save is not None):
            return
        if self._save is None:
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)
        elif self._registration.asked():
            self.asked = True

    def _before_fork(self) -> None:
        """Python forgets a signal that a child gets before its interpreter is ready: until then it stays
        blocked, and so is kept."""
        self._before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)

    def _in_child(self) -> None:
        """In a process that the script has forked, such as a loader,
        the signals have their default effect."""
        for number in SIGNALS:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL)
        self._unblock()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Notes the request; a second one, as of a script that forwards it, changes nothing. In a gang
        rank 0 alone saves; the others go on meanwhile, since rank 0 may need them up to its next boundary."""
        if self._save is not None:
            self._ends = self._ends or number == signal.SIGTERM
            self.asked = True
            if self._idle and self._ends:
                raise SystemExit(SAVED_STATUS)

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """A block without work to save, before the first iteration or after a boundary: a stop in it raises
        SystemExit at once."""
        self._idle = True
        try:
            if self._ends:
                raise SystemExit(SAVED_STATUS)
            yield
        finally:
            self._idle = False

    def boundary(self, done: SupportsInt) -> None:
        """Saves between two iterations, after `done` of them,
        and raises SystemExit where the job is stopped."""
        self.asked = False
        failed = False
        try:
            self._keep(int(done))
        except Exception:  # noqa: BLE001 - the script's own code failed: its training goes on
            failed = True
            traceback.print_exc()
        if self._ends:
            raise SystemExit(1 if failed else SAVED_STATUS)

    def _keep(self, done: int) -> None:
        assert self._save is not None
        if not 0 <= done <= MAX_DONE:
            raise ValueError(f"{done} iterations cannot be: give progress() a count from 0 to {MAX_DONE}")
        began = time.monotonic()
        prefix = f"attempt-{os.environ.get('PENSTOCK_ATTEMPT', '1')}-iteration-"
        done = max([done, *self._iterations(prefix)])  # a process that a wrapper starts again never goes back
        name = f"{prefix}{done}"
        final, new = os.path.join(self._folder, name), os.path.join(self._folder, NEW)
        if not os.path.isdir(final):  # else no iteration has ended since
            shutil.rmtree(new, ignore_errors=True)
            os.mkdir(new)
            self._save(new)
            _sync(new)
            os.rename(new, final)
            _sync_one(self._folder)
        for entry in sorted(os.listdir(self._folder)):  # the remains of an earlier removal come first
            if entry != name:
                self._remove(os.path.join(self._folder, entry))
        seconds = round(time.monotonic() - began, 3)
        found = {"path": name, "iteration": done, "bytes": _bytes(final), "seconds": seconds}
        self._write(json.dumps({"checkpoint": found}, separators=(",", ":")))

    def _iterations(self, prefix: str) -> Iterator[int]:
        """Of the whole checkpoints with these names."""
        for entry in os.listdir(self._folder):
            count = entry.removeprefix(prefix)
            if count != entry and count.isdecimal():
                yield int(count)

    def _remove(self, folder: str) -> None:
        """Removes a checkpoint; if interrupted, the remains do not have the name of a checkpoint."""
        old = os.path.join(self._folder, OLD)
        if os.path.isdir(folder):
            with suppress(OSError):
                os.rename(folder, old)
        shutil.rmtree(old, ignore_errors=True)


def _sync(folder: str) -> None:
    """Syncs a folder to the disk, its content before itself. Raises OSError."""
    for place, _, files in os.walk(folder, topdown=False):
        for file in files:
            with suppress(FileNotFoundError):  # a dangling link
                _sync_one(os.path.join(place, file))
        _sync_one(place)


def _sync_one(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(folder: str) -> int:
    """Size of all files in a folder."""
    return sum(
        os.lstat(os.path.join(place, file)).st_size for place, _, files in os.walk(folder) for file in files
    )


SAVER = Saver()


def checkpoint(save: Act, restore: Act) -> bool:
    """Restores the last checkpoint, if there is one, and saves from now on when Penstock asks. Returns
    whether it restored.

    `save(path)` writes everything that the training needs into an empty folder; `restore(path)` reads it.
    Call this once, in the main thread, when the model is made and before the loop that calls `progress`:
    saves happen inside of it. After SIGTERM the script ends there with SystemExit, status 75 (1 if the save
    failed). In a gang rank 0 saves and all ranks restore.

    Outside of Penstock, and in a job without `checkpoint: sdk`, nothing is saved; `PENSTOCK_RESUME` restores
    there, too. Raises FileNotFoundError if the folder that it names does not exist.
    """
    return SAVER.begin(save, restore)
