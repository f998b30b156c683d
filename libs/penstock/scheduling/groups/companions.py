"""Which jobs may take turns on the same GPUs: jobs of one tenant, or of tenants that both allow it; and no
kinds of jobs whose group was dissolved a short time ago. Asked by the validation of plans, by questions for
plans, and by `why`.

Ideal: any two jobs that may share are planned together. Departure: plans group the jobs of a *circle*: those
that allow any companion, or the others of one tenant.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

from penstock.ledger.derived.stages import stage_times
from penstock.ledger.state.apart import key_of, kind_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.groups.validate_groups import RUNS
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.regroup import regroups

MAX_LOOKED_AT = 256  # running jobs, for `why`
Pairs = Sequence[tuple[str, str]]


def circle_of(job: JobState) -> str:
    """Jobs with equal circles may share GPUs; empty: with all that allow any."""
    return "" if job.spec.companions == "any" else job.spec.owner


def bound(profile: Profile) -> bool:
    """Whether the rules hold under this profile:
    an algorithm of a source knows neither tenants nor measured speeds."""
    return profile.regroup is None or not profile.regroup.exact


def why_apart(state: CellState, jobs: Iterable[JobState]) -> str:
    """Why these jobs may not share GPUs; empty: they may."""
    for one, other in combinations(jobs, 2):
        if one.spec.owner != other.spec.owner and (circle_of(one) or circle_of(other)):
            named = " and ".join(job.job_id for job in (one, other) if circle_of(job))
            return (
                f"{one.job_id} and {other.job_id} are of two tenants, {one.spec.owner} and "
                f"{other.spec.owner}; they share GPUs only where both allow it (`companions: any`), and "
                f"{named} did not"
            )
        pair = state.apart.get(key_of(kind_of(one), kind_of(other))) if state.apart else None
        if pair is not None and pair.until_ms > state.now_ms:
            left_min = max(1, (pair.until_ms - state.now_ms) // 60_000)
            return (
                f"{one.job_id} and {other.job_id} are not grouped for {left_min} minutes, since a group of "
                f"such jobs was dissolved: {pair.reason}"
            )
    return ""


def pairs_apart(state: CellState) -> Pairs:
    """The pairs of kinds that are not grouped now, in order."""
    now_ms = state.now_ms
    return tuple(sorted((pair.one, pair.other) for pair in state.apart.values() if pair.until_ms > now_ms))


def marks_of(pairs: Pairs, job: JobState) -> int:
    """Bits of the pairs in which the job's kind is: two for each pair, one for each side."""
    if not pairs:
        return 0
    kind = kind_of(job)
    return sum(
        ((kind == one) | (kind == other) << 1) << 2 * number for number, (one, other) in enumerate(pairs)
    )


FIRST_SIDES = ((1 << 512) - 1) // 3
"""Bits of the first sides of 256 pairs (`apart.MAX_APART`)."""


def clash(marks: Sequence[int]) -> bool:
    """Whether two jobs with these marks (`marks_of`) are of kinds that are not grouped."""
    return any(
        one & other >> 1 & FIRST_SIDES or other & one >> 1 & FIRST_SIDES
        for one, other in combinations(marks, 2)
    )


def apart_from_all(state: CellState, job: JobState, profile: Profile) -> str:
    """Why a waiting job shares the GPUs of no running one, where the rules above are the reason, and not its
    shape or its stages; empty: they are not. For `why`; O(`MAX_LOOKED_AT`)."""
    if (
        profile.regroup is None
        or not bound(profile)
        or not regroups(job.demand)
        or not stage_times(state, job)
    ):
        return ""
    first = ""
    demand = job.demand
    for order in sorted(state.holding)[:MAX_LOOKED_AT]:
        other = state.holding[order]
        if other.status not in RUNS or other.demand.worker.gpus != demand.worker.gpus:
            continue
        if other.demand.workers != demand.workers or not stage_times(state, other):
            continue
        members = [*state.groups.get(other.sharing.group, {}).values()] or [other]
        why = next(filter(None, (why_apart(state, (member, job)) for member in members)), "")
        if not why:
            return ""
        first = first or why
    return first
