"""A task that judges by itself where it runs: for nodes that keep no history of their own.

Run as `python -I -S judge_task.py FOLDER SECONDS [EXIT_CODE]` with a node's task environment. It holds a lock
per GPU that the driver would give it, per task and per attempt for as long as it lives (the kernel lets go at
its death, however it dies) and writes its start and end into `FOLDER/NODE.jsonl`, in the form of
`judge_node`'s history. Whoever finds a lock taken writes `double` (GPU) or `twice` (job). Standard library
only: it starts in a few milliseconds.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable


def begin(folder: str) -> Callable[..., None]:
    """Takes the locks, and returns what writes into the history."""
    env = os.environ
    node, job, attempt = env["PENSTOCK_NODE_ID"], env["PENSTOCK_JOB_ID"], env["PENSTOCK_ATTEMPT"]
    task, gpus = env["PENSTOCK_TASK_ID"], [gpu for gpu in env["PENSTOCK_GPUS"].split(",") if gpu]
    who = {
        "node": node,
        "job": job,
        "attempt": int(attempt),
        "task": task,
        "token": int(env["PENSTOCK_TOKEN"]),
        "pid": os.getpid(),
    }
    history = os.open(os.path.join(folder, f"{node}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(kind: str, **more: object) -> None:
        line = {
            "at_ns": time.monotonic_ns(),
            "kind": kind,
            **who,
            **more,
        }  # clock: one for all, it orders events
        os.write(history, json.dumps(line).encode() + b"\n")
        os.fsync(history)

    mutex = os.open(os.path.join(folder, "mutex"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(
        mutex, fcntl.LOCK_EX
    )  # two members of a gang must not meet each other's look at another attempt

    def lock(name: str, how: int, *, keep: bool = True) -> bool:
        descriptor = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not keep:
            os.close(descriptor)
        return True

    for gpu in gpus:
        if not lock(f"gpu-{node}-{gpu}", fcntl.LOCK_EX):
            write("double", what=f"{node} gpu {gpu}: {task} met another process")
    if not lock(f"task-{task}", fcntl.LOCK_EX):
        write("twice", what=f"{task} runs twice")
    lock(f"attempt-{job}@{attempt}", fcntl.LOCK_SH)
    for name in os.listdir(folder):
        other = name.startswith(f"attempt-{job}@") and name != f"attempt-{job}@{attempt}"
        if other and not lock(name, fcntl.LOCK_EX, keep=False):
            write("twice", what=f"{job}: attempt {attempt} met {name}")
    write("ran", gpus=gpus)
    os.close(mutex)
    return write


def main() -> int:
    folder, seconds = sys.argv[1], float(sys.argv[2])
    code = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    write = begin(folder)
    time.sleep(seconds)  # clock: this is its work
    write("done", code=code)
    return code


if __name__ == "__main__":
    sys.exit(main())
