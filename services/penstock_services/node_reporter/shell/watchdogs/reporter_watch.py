"""Watchdog of the reporter, in its launcher: a reporter that hangs is killed, so that its end is detected.

Standard library only (see `confinement`). While tasks run, the reporter records contact with the log
(`lease_watch`). After a time without contact as long as the longest lease the launcher probes the reporter,
and kills it when no answer comes: its tasks have ended with their leases, and the kernel closes its
connection to the gateway, which suspects the node (decisions 39, 40). A node without tasks is probed once,
after its last one.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from penstock_services.node_reporter.shell.watchdogs.lease_watch import BootTimer, boot_s

QUESTION, ANSWER = b"?", b"!"
MIN_PATIENCE_S, MAX_PATIENCE_S = 1.0, 30.0
PATIENCE = 1 / 10  # of the lease, within these bounds
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class ReporterWatch:
    """`reporter`: its pidfd. `question`: socket of the probe. `path`: file with its contact, its boot, and
    its longest lease."""

    def __init__(self, path: str, reporter: int, question: socket.socket) -> None:
        """Tasks of an earlier reporter may run: the watch begins. Raises OSError."""
        self._path, self._reporter, self._question = path, reporter, question
        self._timer = BootTimer()
        self._lease_s = 0.0
        """0: nothing is watched."""
        self._killed_s: float | None = None
        """Time of the kill unless it answers, by the monotonic clock."""
        with open(BOOT_ID) as file:
            self._boot_id = file.read().strip()
        self.began()

    def close(self) -> None:
        """In a child that is not a launcher."""
        os.close(self._timer.fd)
        os.close(self._reporter)
        self._question.close()

    def register(self, poll: select.poll) -> None:
        poll.register(self._timer.fd, select.POLLIN)
        poll.register(self._question, select.POLLIN)

    def began(self) -> None:
        """A task has begun: the reporter must have contact within a lease."""
        if not self._lease_s:
            self._lease_s = self._read()[1]
            self._timer.set(boot_s() + self._lease_s if self._lease_s else None)

    def timeout_ms(self) -> int | None:
        """Longest wait before `turn` is due."""
        return None if self._killed_s is None else max(0, round(1_000 * (self._killed_s - time.monotonic())))

    def turn(self, ready: set[int]) -> None:
        """After a poll that returned these descriptors."""
        if self._timer.fd in ready:
            self._due()
        if self._question.fileno() in ready:
            self._answered()
        if self._killed_s is not None and time.monotonic() >= self._killed_s:
            self._kill()

    def _due(self) -> None:
        contact_s, lease_s = self._read()
        self._lease_s = max(lease_s, self._lease_s)
        if contact_s + self._lease_s > boot_s():
            self._timer.set(contact_s + self._lease_s)
            return
        self._timer.set(None)
        self._patience_s = min(max(MIN_PATIENCE_S, PATIENCE * self._lease_s), MAX_PATIENCE_S)
        self._killed_s = time.monotonic() + self._patience_s
        with suppress(OSError):  # it has ended
            self._question.send(QUESTION)

    def _answered(self) -> None:
        """The reporter works, with or without contact: tasks without a lease do not matter here."""
        with suppress(OSError):
            self._question.recv(len(ANSWER))
        self._killed_s = None
        self._lease_s = 0.0
        contact_s, lease_s = self._read()
        if contact_s + lease_s > boot_s():
            self.began()

    def _kill(self) -> None:
        self._killed_s = None
        print(
            f"the node-reporter did not answer within {self._patience_s:g} s, after a lease without contact "
            "with the log, and is killed: "
            "it was stopped, or hung in a driver or a file system",
            file=sys.stderr,
            flush=True,
        )
        with suppress(OSError):
            signal.pidfd_send_signal(self._reporter, signal.SIGKILL)

    def _read(self) -> tuple[float, float]:
        """The latest contact, s of the boot-time clock, and the longest lease, s;
        zeros: none of this boot."""
        try:
            with open(self._path) as file:
                contact_s, boot_id, lease_s = file.read().split()
            return (float(contact_s), float(lease_s)) if boot_id == self._boot_id else (0.0, 0.0)
        except (OSError, ValueError):
            return 0.0, 0.0
