"""Failpoints: named places where a fault test may kill this process as a crash would (SIGKILL, no clean-up).

`PENSTOCK_FAILPOINT=name:n` kills at the n-th passage of `name`. Without the variable a passage costs one
dictionary look-up. The names are listed in `NAMES`, so that the fault suite can prove it visits them all.
"""

import os
import signal

NAMES = frozenset(
    {
        "placer.input_read",
        "placer.record_appended",
        "placer.record_read_back",
        "placer.orders_sent",
        "placer.term_appended",
        "estimator.input_read",
        "estimator.estimate_sent",
        "batcher.question_asked",
        "batcher.plan_solved",
        "batcher.plan_sent",
        "migrator.proposed",
        "migrator.sent",
        "contention_guard.proposed",
        "contention_guard.sent",
        "projector.batch_read",
        "projector.before_commit",
        "projector.after_commit",
        "gateway.before_append",
        "gateway.after_append",
        "node.order_read",
        "node.token_written",
        "node.folder_made",
        "node.task_spawned",
        "node.start_reported",
        "node.exit_noticed",
        "node.exit_reported",
    }
)

_armed: dict[str, int] = {}


def _arm(text: str | None) -> None:
    if text:
        name, _, count = text.partition(":")
        if name not in NAMES:
            raise ValueError(f"PENSTOCK_FAILPOINT: {name!r} is none of {', '.join(sorted(NAMES))}")
        _armed[name] = int(count or "1")


_arm(os.environ.get("PENSTOCK_FAILPOINT"))


def hit(name: str) -> None:
    """Kills this process if the failpoint is armed and this is its n-th passage."""
    left = _armed.get(name)
    if left is None:
        return
    if left <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _armed[name] = left - 1
