"""Remaining time (ETA) of a job at a given time: from its reported steps in the fold, else from its estimate.
Pure.

The estimator's answer counts from the moment it was made; the time since then is subtracted. It holds for one
attempt: after a failure it does not hold for the next one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from penstock.ledger.derived.speed import slowed_ms
from penstock.ledger.state.job.job_state import WAITING, JobState
from penstock.ledger.state.job.remaining import Remaining
from penstock.model.nouns.types import Estimate

MAX_LEFT_MS = 100 * 366 * 86_400_000  # a century: an upper bound for display
REPORT_PROGRESS = (
    "Let the training report its progress: `from penstock.sdk.progress import progress`, then "
    "`progress(done, total)` after each iteration. Else only a later run of the same job can be predicted, "
    "from how long this one takes."
)
ASK_WHY = "`penstock why` shows why it waits."


def ended(job_id: str, outcome: str, ended_ms: int | None, now_ms: int) -> dict[str, Any]:
    """The answer for a job that has ended."""
    return _answer(job_id, outcome, "ended", now_ms=now_ms, ended_ms=ended_ms, outcome=outcome)


def remaining(
    job: Mapping[str, Any], estimate: Estimate | None, eta: Remaining | None, now_ms: int
) -> dict[str, Any]:
    """The answer for a job that has not ended. `job`: its row. `eta`: the latest, of any attempt.

    `answer` is `waiting`, `reported` (by its training), `estimated` (before it ran) or `unknown`; `due` is
    `later`, `any_moment` (the middle has passed) or `overdue` (the high end has passed). Times left are ≥ 0.
    `done` and `steps` are as reported, `share` is of now, by the middle.
    """
    run_ms = None if estimate is None else estimate.run_ms
    source = None if estimate is None or run_ms is None else estimate.source
    answer = partial(
        _answer, job["job_id"], job["status"], now_ms=now_ms, attempt=job["attempt"], run_ms=run_ms
    )
    if job["status"] in WAITING:
        return answer("waiting", source=source, next_step=ASK_WHY)
    ran_ms = None if job["running_ms"] is None else max(0, now_ms - job["running_ms"])
    if eta is not None and eta.attempt == job["attempt"]:
        return answer("reported", ran_ms=ran_ms, **_reported(eta, job["running_ms"], now_ms))
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


def ends_ms(job: JobState, now_ms: int) -> int | None:
    """When a job that holds resources is expected to end, as `remaining` answers; None: not known. Takes
    microseconds, since it is called for many jobs.

    For a job in a group at its present speed there.
    """
    slowed, eta = slowed_ms(job, now_ms), job.progress.eta
    if eta is not None and eta.attempt == job.attempt:
        left_ms = eta.left_ms.middle - eta.passed_ms(job.running_ms, now_ms) + slowed
        return now_ms + _whole(left_ms / job.pace.speed)
    estimate = job.estimate
    run_ms = None if estimate is None else estimate.run_ms_with(job.workers, job.spec.fewest_workers)
    if run_ms is None:
        return None
    ran_ms = 0 if job.running_ms is None else max(0, now_ms - job.running_ms)
    return now_ms + _whole((run_ms - ran_ms + slowed) / job.pace.speed)


def _reported(eta: Remaining, running_ms: int | None, now_ms: int) -> Mapping[str, Any]:
    """The estimator's answer as of now."""
    gone_ms = eta.passed_ms(running_ms, now_ms)
    left = {name: _whole(getattr(eta.left_ms, name) - gone_ms) for name in ("middle", "low", "high")}
    due = "later" if left["middle"] else "any_moment" if left["high"] else "overdue"
    whole = eta.done + eta.steps.middle
    since = min(gone_ms / eta.step_ms.middle, eta.steps.middle) if eta.step_ms.middle > 0 else 0.0
    return {
        "due": due,
        "left_ms": left,
        "ends_ms": {name: now_ms + value for name, value in left.items()},
        "level": eta.level,
        "done": eta.done,
        "steps": msgspec.to_builtins(eta.steps),
        "step_ms": msgspec.to_builtins(eta.step_ms),
        "share": (eta.done + since) / whole if whole else None,
        "source": eta.source,
        "at_ms": eta.at_ms,
        "age_ms": max(0, now_ms - eta.at_ms),
        "model_version": eta.model_version,
        "first_of_kind": eta.first_of_kind,
    }


def _whole(ms: float) -> int:
    return round(min(max(ms, 0.0), MAX_LEFT_MS))


FIELDS = (
    "attempt",
    "due",
    "left_ms",
    "ends_ms",
    "level",
    "done",
    "steps",
    "step_ms",
    "share",
    "source",
    "at_ms",
    "age_ms",
    "model_version",
    "first_of_kind",
    "ran_ms",
    "run_ms",
    "ended_ms",
    "outcome",
    "next_step",
    "start",
)
"""Keys of every answer beside the first four; null where unknown."""


def _answer(job_id: str, status: str, answer: str, *, now_ms: int, **known: Any) -> dict[str, Any]:
    assert known.keys() <= set(FIELDS), known
    head = {"job_id": job_id, "status": str(status), "answer": answer, "now_ms": now_ms}
    return head | {name: known.get(name) for name in FIELDS}
