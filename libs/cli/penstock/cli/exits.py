"""The exit codes, in one table: what scripts and CI pipelines may rely on."""

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
    DETACHED = 130


MEANING = MappingProxyType(
    {
        Exit.OK: "done; a followed job succeeded",
        Exit.PROBLEM: "something else is wrong: an unknown job, a finding of doctor, an error of the gateway",
        Exit.BAD_SPEC: "the job or the command line is wrong",
        Exit.FAILED: "the job failed (with --propagate: the job's own exit code)",
        Exit.CANCELLED: "the job was cancelled",
        Exit.NEVER: "the job can never run here: it fits on no node, even on an empty cluster",
        Exit.QUEUE_TIMEOUT: "the job waited longer than its queue_timeout",
        Exit.RUN_TIMEOUT: "the job ran longer than its run_timeout",
        Exit.UNREACHABLE: "the gateway cannot be reached, or stays overloaded",
        Exit.NOT_ALLOWED: "the gateway wants a token, or another one",
        Exit.KEY_CONFLICT: "the idempotency key was used for another job",
        Exit.DETACHED: "Ctrl-C: stopped following; the job goes on",
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
    """The exit code of a job that ended. With `propagate` a failed job's own code, if it had one above 0."""
    if propagate and state == "failed" and own_code:
        return own_code
    return OF_JOB[state]


def epilog() -> str:
    """The table for `--help`."""
    return "\n\n".join(["[bold]Exit codes[/]", *(f"{code.value}: {text}" for code, text in MEANING.items())])


class Stop(Exception):
    """Ends the command with one line on stderr: what is wrong, where, and the remedy."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code = int(code)
