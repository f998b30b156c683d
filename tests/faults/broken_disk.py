"""A node-reporter on a disk that refuses to sync: fsync and fdatasync fail with EIO, everything else works.

    python -m tests.faults.broken_disk FOLDER [--healthy]

Starts a real node-reporter over a log in memory in FOLDER, breaks the disk (a seccomp filter on this process; the
launcher of tasks was started before and is not touched), sends one order to start `/bin/touch FOLDER/ran` and
waits. Whether the file is there then shows if the order was acted on before its token was on the disk (LAW 4).
"""

import asyncio
import ctypes
import errno
import platform
import struct
import sys
from pathlib import Path

from penstock.runtime.settings import Settings
from penstock_services.node_reporter.shell.run import runner
from tests.faults import mutate
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.node_cell import TOPICS, Cell, node_options, start_order

WAIT_S = 0.7  # for what must not happen: on an idle machine a task starts within 20 ms of its order
PATIENCE_S = 120.0  # for what must happen
LOOK_S = 0.02
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # <linux/prctl.h>, <linux/seccomp.h>
SYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}  # numbers of fsync and fdatasync
BPF_LOAD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>: LD|W|ABS, JMP|JEQ|K, RET|K
RETURN_ALLOW, RETURN_ERRNO = 0x7FFF0000, 0x00050000


def break_disk() -> None:
    """From now on this thread and its children cannot sync. Raises OSError where the kernel has no seccomp."""
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


async def main(folder: Path, *, healthy: bool) -> None:
    broker = MemoryBroker()
    broker.create(TOPICS)
    log = MemoryLog(broker, "test")
    options = node_options(folder, virtual_gpus=1, cores=1, host_memory_mib=1_024)
    stop, ready = asyncio.Event(), asyncio.Event()
    service = asyncio.ensure_future(runner(options)(Settings(log_url="memory"), stop, log=log, ready=ready))
    await asyncio.wait_for(ready.wait(), 10)
    if not healthy:
        break_disk()
    await Cell(log).order(start_order(5, "/bin/touch", str(folder / "ran")))
    for _ in range(round((PATIENCE_S if healthy else WAIT_S) / LOOK_S)):
        if (folder / "ran").exists():
            break
        await asyncio.sleep(LOOK_S)
    stop.set()
    await asyncio.wait({service}, timeout=5)
    print("ran" if (folder / "ran").exists() else "refrained", flush=True)


if __name__ == "__main__":
    mutate.put_in_from_environment()
    asyncio.run(main(Path(sys.argv[1]), healthy="--healthy" in sys.argv))
