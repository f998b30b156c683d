"""Reasons for a job's position in an order by time, as text; for `why`."""

from math import inf

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.service import fixed_cost_s, loses, remaining_s, stop_cost_s


def cost_text(state: CellState, job: JobState) -> str:
    """`; stopping it costs 12 s`, with the part of it that is lost work; for `why`. Empty: it costs
    nothing."""
    cost_s = stop_cost_s(state, job)
    if not cost_s:
        return ""
    lost_s = cost_s - fixed_cost_s(job)
    lost = f", of which {lost_s:,.0f} s are work that is not saved" if loses(job) else ""
    return f"; stopping it costs {cost_s:,.1f} s{lost}"


def remaining_text(state: CellState, job: JobState) -> str:
    """`90 s left (80 to 120), by 200 finished runs`: the time with its interval and source; for `why`."""
    left_s = remaining_s(state, job)
    if left_s == inf:
        return "time left unknown"
    text = f"{left_s:,.0f} s left"
    if job.remaining_s is not None:
        return f"{text}, as it reports"
    if (eta := job.eta) is None:
        return f"{text}, as estimated"
    passed_ms = eta.passed_ms(job.running_ms, state.now_ms)
    low, high = (max(0.0, end - passed_ms) / 1_000 for end in (eta.left_ms.low, eta.left_ms.high))
    return f"{text} ({low:,.0f} to {high:,.0f}), by {eta.source}"
