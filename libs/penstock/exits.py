"""Exit codes of every command and service, in one table: what scripts and CI pipelines may rely on."""

from enum import IntEnum
from types import MappingProxyType


class Exit(IntEnum):
    OK = 0
    PROBLEM = 1
    BAD_SPEC = 2
    FAILED = 10
    CANCELLED = 11
    NEVER = 13
    QUEUE_TIMEOUT = 14
    RUN_TIMEOUT = 15
    UNREACHABLE = 20
    NOT_ALLOWED = 21
    KEY_CONFLICT = 22
    WAIT_TIMEOUT = 124
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


MEANING = MappingProxyType(
    {
        Exit.OK: "succeeded",
        Exit.PROBLEM: "something else is wrong",
        Exit.BAD_SPEC: "bad job or command line",
        Exit.FAILED: "job failed (its own code with --propagate)",
        Exit.CANCELLED: "job cancelled",
        Exit.NEVER: "job can never run here",
        Exit.QUEUE_TIMEOUT: "job waited too long",
        Exit.RUN_TIMEOUT: "job ran too long",
        Exit.UNREACHABLE: "gateway unreachable or overloaded",
        Exit.NOT_ALLOWED: "not allowed: no token, or one without the role",
        Exit.KEY_CONFLICT: "idempotency key used for another job",
        Exit.WAIT_TIMEOUT: "wait --timeout: some jobs have not ended yet",
        Exit.HUNG_UP: "SIGHUP: following stopped, the job goes on",
        Exit.INTERRUPTED: "Ctrl-C: following stopped, the job goes on",
        Exit.TERMINATED: "SIGTERM: following stopped, the job goes on",
    }
)

OF_JOB = MappingProxyType(
    {
        "succeeded": Exit.OK,
        "failed": Exit.FAILED,
        "cancelled": Exit.CANCELLED,
        "unschedulable": Exit.NEVER,
        "timed_out_queued": Exit.QUEUE_TIMEOUT,
        "timed_out_running": Exit.RUN_TIMEOUT,
    }
)
"""Final job state → exit code."""


def of_job(state: str, own_code: int | None, *, propagate: bool) -> int:
    """The exit code of a job that ended; 1 for a final state that only a newer gateway knows. With
    `propagate` a failed job's own code, if above 0."""
    if propagate and state == "failed" and own_code:
        return own_code
    return OF_JOB.get(state, Exit.PROBLEM)


class Stop(Exception):
    """Ends the command with these lines on stderr: what is wrong, where, and the remedy."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = int(code)


class BadCommand(Stop):
    """The command line asks for something that does not exist; the message lists what does."""

    def __init__(self, text: str) -> None:
        super().__init__(Exit.BAD_SPEC, text)
