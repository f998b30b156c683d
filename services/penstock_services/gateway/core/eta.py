"""Remaining time (ETA) of a job as of a moment: from the latest report of its training, else from its estimate. Pure.

The estimator's report counts from the moment it was made; what has passed since is taken off. It is of one attempt:
after a failure it does not hold for the next one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from penstock.model.transitions import JobStatus
from penstock.model.types import Estimate

MAX_LEFT_MS = 100 * 366 * 86_400_000  # a century: no clock and no screen shows more
WAITING = frozenset({JobStatus.SUBMITTED, JobStatus.QUEUED, JobStatus.BACKOFF})
REPORT_PROGRESS = (
    "Let the training report its progress: `from penstock.sdk.progress import progress`, then `progress(done, total)` "
    "after each iteration. Else only a later run of the same job can be predicted, from how long this one takes."
)
ASK_WHY = "`penstock why` says why it waits."


class Bounds(msgspec.Struct, frozen=True):
    """Milliseconds or iterations."""

    middle: float
    low: float
    high: float


class EtaReport(msgspec.Struct, frozen=True):
    """What is read of a `penstock.job.eta_estimated` event, of this version or a newer one."""

    attempt: int
    at_ms: int
    done: int
    left_ms: Bounds
    steps: Bounds
    step_ms: Bounds
    level: float
    source: str
    model_version: str | None = None
    first_of_kind: bool = False
    recorded_ms: int | None = None
    """When the ledger took it in; `at_ms` is by the node's clock, which may be ahead. Not of the event itself."""


def read_report(text: str | bytes, recorded_ms: int | None = None) -> EtaReport:
    """The data of the event, and when the ledger took it in. Raises `msgspec.DecodeError`."""
    return msgspec.structs.replace(msgspec.json.decode(text, type=EtaReport), recorded_ms=recorded_ms)


def ended(job_id: str, outcome: str, ended_ms: int | None, now_ms: int) -> dict[str, Any]:
    """The answer for a job that has ended."""
    return _answer(job_id, outcome, "ended", now_ms=now_ms, ended_ms=ended_ms, outcome=outcome)


def remaining(
    job: Mapping[str, Any], estimate: Estimate | None, report: EtaReport | None, now_ms: int
) -> dict[str, Any]:
    """The answer for a job that has not ended. `job`: its row. `report`: the latest, of whatever attempt.

    `answer` is `waiting`, `told` (by its training), `estimated` (before it ran) or `unknown`; `due` is `later`,
    `any_moment` (the middle has passed) or `overdue` (the high end has passed). Times left are ≥ 0. `done` and `steps` are as
    reported, `share` is of now, by the middle.
    """
    run_ms = None if estimate is None else estimate.run_ms
    source = None if estimate is None or run_ms is None else estimate.source
    answer = partial(
        _answer, job["job_id"], job["status"], now_ms=now_ms, attempt=job["attempt"], run_ms=run_ms
    )
    if job["status"] in WAITING:
        return answer("waiting", source=source, next_step=ASK_WHY)
    ran_ms = None if job["running_ms"] is None else max(0, now_ms - job["running_ms"])
    if report is not None and report.attempt == job["attempt"]:
        return answer("told", ran_ms=ran_ms, **_reported(report, now_ms))
    if run_ms is None:
        return answer("unknown", ran_ms=ran_ms, next_step=REPORT_PROGRESS)
    left_ms = max(0, run_ms - (ran_ms or 0))
    return answer(
        "estimated",
        ran_ms=ran_ms,
        due="later" if left_ms else "overdue",
        left_ms={"middle": left_ms, "low": None, "high": None},
        ends_ms={"middle": now_ms + left_ms, "low": None, "high": None},
        source=source,
        next_step=REPORT_PROGRESS,
    )


def _reported(report: EtaReport, now_ms: int) -> Mapping[str, Any]:
    """The report as of now. It was made before the ledger took it in, even where the node's clock is ahead."""
    made_ms = report.at_ms if report.recorded_ms is None else min(report.at_ms, report.recorded_ms)
    age_ms = max(0, now_ms - made_ms)
    left = {name: _whole(getattr(report.left_ms, name) - age_ms) for name in ("middle", "low", "high")}
    due = "later" if left["middle"] else "any_moment" if left["high"] else "overdue"
    whole = report.done + report.steps.middle
    since = min(age_ms / report.step_ms.middle, report.steps.middle) if report.step_ms.middle > 0 else 0.0
    return {
        "due": due,
        "left_ms": left,
        "ends_ms": {name: now_ms + value for name, value in left.items()},
        "level": report.level,
        "done": report.done,
        "steps": msgspec.to_builtins(report.steps),
        "step_ms": msgspec.to_builtins(report.step_ms),
        "share": (report.done + since) / whole if whole else None,
        "source": report.source,
        "at_ms": report.at_ms,
        "age_ms": age_ms,
        "model_version": report.model_version,
        "first_of_kind": report.first_of_kind,
    }


def _whole(ms: float) -> int:
    return round(min(max(ms, 0.0), MAX_LEFT_MS))


FIELDS = (
    "attempt", "due", "left_ms", "ends_ms", "level", "done", "steps", "step_ms", "share", "source", "at_ms", "age_ms",
    "model_version", "first_of_kind", "ran_ms", "run_ms", "ended_ms", "outcome", "next_step", "start",
)  # fmt: skip
"""Keys of every answer beside the first four; null where unknown."""


def _answer(job_id: str, status: str, answer: str, *, now_ms: int, **known: Any) -> dict[str, Any]:
    assert known.keys() <= set(FIELDS), known
    head = {"job_id": job_id, "status": str(status), "answer": answer, "now_ms": now_ms}
    return head | {name: known.get(name) for name in FIELDS}
