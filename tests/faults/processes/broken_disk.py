"""A node-reporter on a disk that refuses to sync: fsync and fdatasync fail with EIO, everything else works.

    python -m tests.faults.processes.broken_disk FOLDER [--healthy]

Starts a real node-reporter over a log in memory in FOLDER, breaks the disk (a seccomp filter on this process;
the launcher of tasks was started before and is not touched), sends one order to start `/bin/touch FOLDER/ran`
and waits until the file is there or the node reports that its disk fails. Which of the two shows if the order
was acted on before its token was on the disk (LAW 4).
"""

import asyncio
import ctypes
import errno
import logging
import platform
import struct
import sys
from pathlib import Path

from penstock.runtime.settings import Settings
from penstock_services.node_reporter.shell.run import runner
from tests.faults import mutate
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.node_cell import TOPICS, Cell, node_options, start_order
from tests.support.waiting import await_until, begin_run

WAIT_S = 0.2  # for what must not happen: on an idle machine a task starts within 20 ms of its order
LONGEST_S = 3_600.0  # outside of a test run
REPORTED = "the journal cannot be used"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # <linux/prctl.h>, <linux/seccomp.h>
SYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}  # numbers of fsync and fdatasync
BPF_LOAD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>: LD|W|ABS, JMP|JEQ|K, RET|K
RETURN_ALLOW, RETURN_ERRNO = 0x7FFF0000, 0x00050000


def break_disk() -> None:
    """From now on this thread and its children cannot sync. Raises OSError where the kernel has no
    seccomp."""
    first, second = SYNCS[platform.machine()]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (BPF_LOAD, 0, 0, 0),  # the number of the system call
            (BPF_JUMP_EQUAL, 1, 0, first),
            (BPF_JUMP_EQUAL, 0, 1, second),
            (BPF_RETURN, 0, 0, RETURN_ERRNO | errno.EIO),
            (BPF_RETURN, 0, 0, RETURN_ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program)
    holder = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, holder, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


class Failures(logging.Handler):
    """Whether the node has reported that it cannot write."""

    came = False

    def emit(self, record: logging.LogRecord) -> None:
        self.came = self.came or REPORTED in record.getMessage()


async def main(folder: Path, *, healthy: bool) -> None:
    broker = MemoryBroker()
    broker.create(TOPICS)
    log = MemoryLog(broker, "test")
    options = node_options(folder, virtual_gpus=1, cores=1, host_memory_mib=1_024)
    stop, ready = asyncio.Event(), asyncio.Event()
    service = asyncio.ensure_future(runner(options)(Settings(log_url="memory"), stop, log=log, ready=ready))
    await asyncio.wait({service, asyncio.ensure_future(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    ran, failures = folder / "ran", Failures()
    logging.getLogger("penstock_services.node_reporter").addHandler(failures)
    if not healthy:
        break_disk()
    await Cell(log).order(start_order(5, "/bin/touch", str(ran)))
    await await_until(
        lambda: ran.exists() or failures.came or service.done(), "the task, or a failure of the disk"
    )
    if failures.came:
        await asyncio.sleep(WAIT_S)  # clock: the task must not start after all
    stop.set()
    await asyncio.wait({service})
    print("ran" if ran.exists() else "refrained", flush=True)


if __name__ == "__main__":
    mutate.put_in_from_environment()
    begin_run(LONGEST_S)
    asyncio.run(main(Path(sys.argv[1]), healthy="--healthy" in sys.argv))
