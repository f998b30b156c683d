"""What a group's plan promised its members, and what they report: the part of their time in which they wait
for turns.

Ideal: the speed relative to running alone. Departure: that speed alone is known only for jobs that have run
so; the part of an iteration without waits is an upper bound of it, needs no other run, and changes less where
the whole machine is slow. What a plan promises contains more than waits (`interleave.LOSS`), so a group that
works is above it.
"""

from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import SPEED_STEP


def promised(state: CellState, job: JobState) -> float:
    """The speed that the group's plan promised a member; without a prediction an equal part of the time."""
    if job.sharing.turns is not None:
        return min(1.0, job.pace.speed)
    return 1.0 / len(state.groups[job.sharing.group])


def compare(state: CellState, job: JobState) -> None:
    """After a new speed, or a new promise. A speed that was reported may have risen by `SPEED_STEP` since."""
    part, short_ms = job.sharing.measured, None
    if job.sharing.group and part is not None and part * SPEED_STEP < promised(state, job):
        short_ms = state.now_ms if job.sharing.short_ms is None else job.sharing.short_ms
    if short_ms != job.sharing.short_ms:
        job.sharing = replace(job.sharing, short_ms=short_ms)
