"""Fork server: a small process that starts tasks for the reporter; stdlib only, one thread, so that it may
fork safely.

Ideal: the reporter forks each task itself. Departure: it has threads and a large heap, and a fork of those
is neither safe nor quick.

Run by the reporter with `LAUNCHER`, a socket, the lock, a `Confinement` and arguments of
`reporter_watch.ReporterWatch` or null (JSON). It always has one *shim* ready, forked beforehand, in its
namespace, with the process that will become the program (forks and their page faults would be most of a
start's time). A shim takes one request from the socket, see `shim`. It outlives launcher and reporter.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from penstock_services.node_reporter.shell.isolation.confinement import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    Confinement,
    enter_namespaces,
    leave_keyring,
    prctl,
)
from penstock_services.node_reporter.shell.process.shim import Shim
from penstock_services.node_reporter.shell.watchdogs.reporter_watch import ReporterWatch

ROOT = os.path.abspath(f"{__file__}/../../../../..")
IMPORTABLE = f"import sys; sys.path.insert(0, {ROOT!r}); "
"""Gives `python -I -S -c` these modules and no other packages."""
LAUNCHER = IMPORTABLE + "from penstock_services.node_reporter.shell.process.launcher import main; main()"


def guard(control: socket.socket, lock_fd: int, taken_fd: int, plan: Confinement) -> NoReturn:
    """A shim's whole life. If it fails, the traceback goes to `shim.err` and the kernel kills its leader."""
    try:
        failure = None
        try:
            enter_namespaces(plan)
        except OSError as error:  # no further namespace is available: the task of this shim cannot start
            failure = error
        shim = Shim(control, lock_fd, taken_fd, plan, failure)
        shim.prepare()
        shim.run()
    finally:
        bug = sys.exc_info()[1]
        if bug is not None:
            sys.excepthook(type(bug), bug, bug.__traceback__)
            sys.stderr.flush()
        os._exit(0 if bug is None else 1)


def main() -> None:
    """Holds one shim ready until the reporter closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lock_fd = int(sys.argv[2])
    plan, watched = Confinement(*json.loads(sys.argv[3])), json.loads(sys.argv[4])
    watch = None
    if watched is not None:
        path, reporter, question = watched
        for descriptor in (reporter, question):
            os.set_inheritable(descriptor, False)
        watch = ReporterWatch(path, reporter, socket.socket(fileno=question))
    for descriptor in (control.fileno(), lock_fd):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # shims are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prctl(PR_SET_NAME, b"penstock-launch", 0, 0, 0)
    prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # a shim's parent ends as it enters its namespace; the shim remains a descendant of the launcher
    leave_keyring()
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        taken_read, taken_write = os.pipe()
        if os.fork() == 0:
            os.close(taken_read)
            if watch is not None:
                watch.close()
            guard(control, lock_fd, taken_write, plan)
        os.close(taken_write)
        if not taken(control, taken_read, watch):
            return
        os.close(taken_read)
        if watch is not None:
            watch.began()


def taken(control: socket.socket, taken_read: int, watch: ReporterWatch | None) -> bool:
    """Waits until the shim has closed its end: it has a task, or was killed. False: the reporter has closed
    its own."""
    poll = select.poll()
    poll.register(taken_read, select.POLLIN)
    poll.register(control, 0)  # for its hang-up alone
    if watch is not None:
        watch.register(poll)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(None if watch is None else watch.timeout_ms())}
        if control.fileno() in ready:
            return False
        if taken_read in ready:
            return not any(descriptor == control.fileno() for descriptor, _ in poll.poll(0))
        if watch is not None:
            watch.turn(ready)
