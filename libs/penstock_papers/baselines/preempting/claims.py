"""Reasons for a job's position in an order by time, as text; for `why`."""

from math import inf

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.remaining_time import remaining_s
from penstock.scheduling.stop_cost import fixed_cost_s, loses, stop_cost_s
from penstock.text.spans import span


def cost_text(state: CellState, job: JobState) -> str:
    """`; a stop costs 12 s, 10 s of it unsaved work`; for `why`. Empty: a stop costs nothing."""
    cost_s = stop_cost_s(state, job)
    if not cost_s:
        return ""
    lost_s = cost_s - fixed_cost_s(job)
    lost = f", {span(1_000 * lost_s)} of it unsaved work" if loses(job) else ""
    return f"; a stop costs {span(1_000 * cost_s)}{lost}"


def remaining_text(state: CellState, job: JobState) -> str:
    """`5 min left (4 min to 8 min), by 200 finished runs`: the time with its interval and source; for
    `why`."""
    left_s = remaining_s(state, job)
    if left_s == inf:
        return "run time unknown"
    text = f"{span(1_000 * left_s)} left"
    if job.progress.remaining_s is not None:
        return f"{text}, as the job reports"
    if (eta := job.progress.eta) is None:
        return f"{text}, as estimated"
    passed_ms = eta.passed_ms(job.running_ms, state.now_ms)
    low, high = (span(max(0.0, end - passed_ms)) for end in (eta.left_ms.low, eta.left_ms.high))
    return f"{text} ({low} to {high}), by {eta.source}"
