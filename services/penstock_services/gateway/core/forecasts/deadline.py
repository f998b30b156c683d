"""Deadline forecast of a job: its odds of being in time, and the deadline that would hold, from its expected
start and its run time with an interval. Pure, and read only.

The start of a waiting job is that of the forecast (`penstock.why.forecast`) for the number of workers that
the profile gives it now, or one of several that are equally likely once this cell's forecasts are known to be
off (`forecast_errors`). The deadline that would hold is searched over the numbers of workers that it may
have, with its place in line unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import ceil, inf
from typing import Any, NamedTuple

from penstock.cluster.capacity import shortfall
from penstock.errors import one_line
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_MS, Estimate, ShapeOption
from penstock.scheduling.order.deadlines import SURE, RunTime, RunTimes, due_ms, run_time, time_left
from penstock.scheduling.profiles import profile_for
from penstock.sdk.job_file.job_warnings import Doubt
from penstock.sdk.job_file.units import MS_PER_UNIT, show
from penstock.text.counting import count
from penstock.why.forecast import expected_start, expected_starts
from penstock_services.gateway.core.forecasts.eta import MAX_LEFT_MS, ends_ms
from penstock_services.gateway.core.forecasts.forecast_errors import ForecastErrors

MAX_FORECASTS = 4  # of one job with different numbers of workers, about 0.1 s each in the largest cells
LIKELY = 0.5  # lower odds lead to a warning at submission
ROUNDED_FROM_MS = 600_000  # a deadline is proposed in whole minutes from here on, below in whole seconds

NO_ESTIMATE = "it has no estimate yet"
NO_TIME = "its run time is unknown"
NO_INTERVAL = "no confidence interval: this job has no step times for this number of workers"
OVERDUE = "it takes longer than estimated"
NOT_IN_LINE = "it is held, or pauses after a failure"


class Outlook(NamedTuple):
    """The forecast of one job. Times are the ledger's, in ms;
    None where not known, and `unknown` names the cause."""

    job_id: str
    qos: str
    """Its service class: urgent, prior or normal; empty: it names a deadline of its own."""
    now_ms: int
    due_ms: int | None
    """None also for an urgent one, which is to end as soon as possible."""
    starts_ms: int | None = None
    """Start by the forecast; of a job that holds resources the time of its placement."""
    ends_ms: int | None = None
    """Expected end."""
    workers: int | None = None
    odds: float | None = None
    """Probability that it ends by `due_ms`, 0 – 1."""
    level: float = SURE
    sure_ms: int | None = None
    """The time by which it ends with odds of `level`."""
    sure_workers: int | None = None
    """Number of workers for it; of a waiting job the number with the earliest deadline."""
    deadline_ms: int | None = None
    """The shortest deadline, after its submission, that holds with odds of `level`."""
    learned: int = 0
    """Number of earlier forecasts whose errors are in the odds and in the times above but `starts_ms`; 0: it
    starts as forecast for certain."""
    unknown: str = ""


def outlook(state: CellState, job: JobState, now_ms: int, errors: ForecastErrors) -> Outlook | None:
    """None: the job names neither a deadline nor a service class."""
    if not job.spec.timed:
        return None
    if job.status in HOLDING:
        return _of_running(job, now_ms)
    if (cause := _not_in_line(job)) is not None:
        return _head(job, now_ms)._replace(unknown=cause)
    options, ends = _options(job), _ends(state, now_ms)
    chosen = _chosen(state, job, options)
    if not chosen:
        return _head(job, now_ms)._replace(unknown=NO_INTERVAL)
    start = expected_start(state, job.shaped(chosen.workers), ends, now_ms)
    if start is None or start.starts_ms is None:
        return _head(job, now_ms)._replace(unknown="" if start is None else start.unknown)
    found = _of_waiting(job, chosen, start.starts_ms, now_ms, errors)
    if found.odds is not None and found.odds >= SURE:
        return found
    return _with_earliest(state, job, options, ends, found, errors)


def outlooks(
    state: CellState, jobs: Iterable[JobState], now_ms: int, errors: ForecastErrors
) -> list[Outlook]:
    """Of all jobs with a deadline or a service class, lowest odds first, then those with unknown odds, each
    by due time.

    Waiting jobs are forecast together, and only with the workers that the profile gives them.
    """
    timed = [job for job in jobs if job.spec.timed]
    found = [_of_running(job, now_ms) for job in timed if job.status in HOLDING]
    waiting = [job for job in timed if job.status not in HOLDING]
    chosen = {
        job.job_id: option
        for job in waiting
        if _not_in_line(job) is None and (option := _chosen(state, job, _options(job))) is not None
    }
    asked = [job.shaped(chosen[job.job_id].workers) for job in waiting if job.job_id in chosen]
    starts = expected_starts(state, asked, _ends(state, now_ms), now_ms) if asked else {}
    for job in waiting:
        option, start = chosen.get(job.job_id), starts.get(job.job_id)
        if option is not None and start is not None:
            found.append(_of_waiting(job, option, start, now_ms, errors))
        else:
            cause = _not_in_line(job) or (NO_INTERVAL if option is None else "its start is not known")
            found.append(_head(job, now_ms)._replace(unknown=cause))
    return sorted(found, key=_rank)


def _rank(one: Outlook) -> tuple[float, float, str]:
    return (2.0 if one.odds is None else one.odds, inf if one.due_ms is None else one.due_ms, one.job_id)


def answer(one: Outlook | None) -> dict[str, Any] | None:
    """As JSON."""
    return None if one is None else one._asdict() | {"odds": None if one.odds is None else round(one.odds, 4)}


def failed(job: JobState, now_ms: int, error: Exception) -> Outlook:
    """The answer where the profile's own order raised an error."""
    return _head(job, now_ms)._replace(unknown=f"the profile's order failed: {one_line(error)}")


def _head(job: JobState, now_ms: int) -> Outlook:
    due = due_ms(job)
    return Outlook(
        job.job_id, service_class(job.spec), now_ms, None if due is None or due == inf else _whole(due)
    )


def service_class(spec: JobSpec) -> str:
    """Class of a job with a service class or a deadline; empty: it has a deadline of its own."""
    return "" if spec.deadline_ms is not None else spec.qos or "normal"


def _not_in_line(job: JobState) -> str | None:
    """Why the start or the run time of a waiting job cannot be forecast; None: it can."""
    if job.status is JobStatus.SUBMITTED or job.estimate is None:
        return NO_ESTIMATE
    if job.unschedulable:
        return job.unschedulable
    if not job.in_line:
        return NOT_IN_LINE
    return NO_TIME if job.estimate.run_ms is None else None


def _options(job: JobState) -> Sequence[ShapeOption]:
    """Options within its range, fewest workers first."""
    options = () if job.estimate is None else job.estimate.options
    return [one for one in options if job.spec.fewest_workers <= one.workers <= job.spec.workers]


def _chosen(state: CellState, job: JobState, options: Sequence[ShapeOption]) -> ShapeOption | None:
    """With the workers that the profile gives it if all of them are free."""
    shape, most = profile_for(state.settings).shape, job.spec.workers
    if job.spec.min_workers is not None and shape is not None:
        most = shape.shape(state, job, most)[0]
    return next((one for one in options if one.workers == most), None)


def _ends(state: CellState, now_ms: int) -> Mapping[str, int]:
    return {job.job_id: end for job in state.holding.values() if (end := ends_ms(job, now_ms)) is not None}


def _of_waiting(
    job: JobState, option: ShapeOption, starts_ms: int, now_ms: int, errors: ForecastErrors
) -> Outlook:
    starts = errors.starts(now_ms, starts_ms)
    each = [time for start in starts if (time := run_time(job, option, start)) is not None]
    return _of_time(job, RunTimes(each) if each else None, now_ms)._replace(
        starts_ms=starts_ms,
        workers=option.workers,
        sure_workers=option.workers,
        learned=errors.learned if len(starts) > 1 else 0,
    )


def _of_running(job: JobState, now_ms: int) -> Outlook:
    found = time_left(job, now_ms)
    if found is None:
        one = _head(job, now_ms)._replace(ends_ms=ends_ms(job, now_ms))
        one = one._replace(unknown=NO_TIME if one.ends_ms is None else NO_INTERVAL)
    elif found.overdue:
        one = _head(job, now_ms)._replace(unknown=OVERDUE)
    else:
        one = _of_time(job, found, now_ms)
    return one._replace(starts_ms=job.placed_ms, workers=job.workers, sure_workers=job.workers)


def _of_time(job: JobState, found: RunTime | RunTimes | None, now_ms: int) -> Outlook:
    one = _head(job, now_ms)
    if found is None:
        return one._replace(unknown=NO_TIME)
    ends, sure = found.by_ms(0.5), found.by_ms(SURE)
    assert ends is not None, job.job_id
    assert sure is not None, job.job_id
    return one._replace(
        ends_ms=_whole(ends),
        odds=None if one.due_ms is None else found.odds(one.due_ms),
        sure_ms=_whole(sure),
        deadline_ms=_whole(sure) - job.submitted_ms,
    )


def _with_earliest(
    state: CellState,
    job: JobState,
    options: Sequence[ShapeOption],
    ends: Mapping[str, int],
    found: Outlook,
    errors: ForecastErrors,
) -> Outlook:
    """With the earliest deadline that holds, over the numbers of workers; no later than that of `found`,
    which is computed already."""
    assert found.sure_ms is not None, job.job_id
    at_best = {
        option.workers: time.by_ms(SURE) or inf
        for option in options
        if option.workers != found.workers and (time := run_time(job, option, found.now_ms)) is not None
    }
    forecasts = 1
    for option in sorted(options, key=lambda one: at_best.get(one.workers, inf)):
        if at_best.get(option.workers, inf) >= (found.sure_ms or inf) or forecasts == MAX_FORECASTS:
            break
        forecasts += 1
        start = expected_start(state, job.shaped(option.workers), ends, found.now_ms)
        if start is None or start.starts_ms is None:
            continue
        other = _of_waiting(job, option, start.starts_ms, found.now_ms, errors)
        if other.sure_ms is not None and other.sure_ms < (found.sure_ms or inf):
            found = found._replace(
                sure_ms=other.sure_ms, sure_workers=other.workers, deadline_ms=other.deadline_ms
            )
    return found


def warning(one: Outlook) -> Doubt | None:
    """Warning that it is unlikely to be in time, with the deadline that would hold; None: it is likely, or
    the odds are not known."""
    if one.odds is None or one.odds >= LIKELY:
        return None
    field = "qos" if one.qos else "deadline"
    return Doubt(field, f"is met with a probability of {percent(one.odds)}", would_hold(one))


def percent(odds: float) -> str:
    """`12 %`, `less than 1 %`."""
    return "less than 1 %" if odds < 0.01 else f"{100 * odds:.0f} %"


def would_hold(one: Outlook) -> str:
    """The shortest deadline that holds, as text for users."""
    if one.deadline_ms is None or one.deadline_ms > MAX_LEFT_MS:
        return "give a later one"
    with_ = "" if one.sure_workers is None else f" with {count(one.sure_workers, 'worker')}"
    sure = f"with a probability of {100 * one.level:.0f} %{with_}, given the present queue"
    return f"a deadline of {proposed(one.deadline_ms)} would be met {sure}"


def proposed(deadline_ms: int) -> str:
    """In the format of a job file, rounded up: `2h`, `95m`, `40s`."""
    unit_ms = MS_PER_UNIT["m" if deadline_ms >= ROUNDED_FROM_MS else "s"]
    return show(max(1, -(-deadline_ms // unit_ms)) * unit_ms, MS_PER_UNIT)


def tried(
    state: CellState, spec: JobSpec, estimate: Estimate, now_ms: int, errors: ForecastErrors
) -> Outlook | None:
    """As `outlook`, of a job that is not submitted, as if it were submitted now with this estimate. None: it
    names neither a deadline nor a service class."""
    if not spec.timed:
        return None
    order = max([state.seq, *state.queue]) + 1
    job = JobState("", spec, order, now_ms, JobStatus.QUEUED, estimate, queued_ms=now_ms)
    beside = copy(state)  # a read-only copy with a queue and jobs of its own
    beside.queue, beside.jobs = state.queue.copy(), {**state.jobs, job.job_id: job}
    beside.queue[order] = job.job_id
    if short := shortfall(state.index, job.demand):
        job.unschedulable = short.detail
    return outlook(beside, job, now_ms, errors)


def _whole(ms: float) -> int:
    return ceil(min(max(ms, 0.0), MAX_MS))
