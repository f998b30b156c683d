"""Moldable jobs: the number of workers of an attempt is chosen from the job's range when it is placed.

Ideal: the number with which the job completes first, with regard to all future jobs. Departure: only numbers
that fit now are compared, by a stage of the profile; without a stage as many workers as fit are used. The
place stage then finds nodes for a gang of that size, as for any other. If it finds none (nodes are reserved
for others, or it requires distinct nodes), the largest smaller number for which it does is found by
bisection, since a gang that fits also fits with fewer workers. A job that cannot start with its minimum
waits.

Source of the term: Feitelson and Rudolph, JSSPP '96 (moldable: the number of processors is set at the start
and stays).
"""

from msgspec.structs import replace

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.view import ClusterView
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import MAX_TEXT, ShapeOption
from penstock.scheduling.stages.protocols import Choose, Shape

MOST = "as many as fit now"
MIN_EFFICIENCY = 0.5  # below it two GPUs do less than one of the fewest workers' GPUs
FEWER = "as many as the profile finds nodes for now"


def place_moldable(
    state: CellState, job: JobState, choose: Choose, rng: LazyRng, stage: Shape | None
) -> Plan | None:
    """As `choose`, for a waiting job with a range of workers; None where not even its minimum, which is its
    present number, fits."""
    fewest = job.spec.fewest_workers
    fitting = ClusterView(state).tasks_that_fit(job.demand_of(job.spec.workers))
    if fitting < fewest:
        return None
    wanted, why = (fitting, MOST) if stage is None else stage.shape(state, job, fitting)
    if wanted > fitting:
        return None
    plan = choose(state, job.shaped(wanted), rng)
    if plan is None and wanted > fewest:
        plan, why = choose(state, job, rng), FEWER
        low, high = fewest, wanted
        while plan is not None and high - low > 1:
            middle = (low + high) // 2
            found = choose(state, job.shaped(middle), rng)
            if found is None:
                high = middle
            else:
                low, plan = middle, found
    return None if plan is None else _explained(job, plan, why)


def as_it_waits(state: CellState, job: JobState, stage: Shape | None) -> JobState:
    """The job with the workers for which it waits: of a moldable job its minimum, or the number for which the
    stage lets it wait. For `why` and forecasts."""
    if job.spec.min_workers is None or stage is None or not stage.waits:
        return job
    return job.shaped(stage.shape(state, job, job.spec.workers)[0])


class ShortestStep:
    """The number of workers with the shortest iteration, among those whose GPUs do at least MIN_EFFICIENCY of
    the work that each of the fewest workers' GPUs does. Implements
    `penstock.scheduling.stages.protocols.Shape`.

    Ideal: the shortest completion for the job and all waiting jobs. Departure: waiting is ignored, since only
    numbers that fit now are compared, and others are protected only by the bound. Source: GENIE's choice of
    ⟨nodes, GPUs⟩ by performance per cost (eq. 5, with cost = GPUs); differs: a bound instead of the best
    ratio, which would nearly always be that of the fewest. Until times for the fewest and for the most that
    fit are known, as many as fit are used, so that no job stays with the first number that was measured.
    """

    waits = False

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        offered = [workers for workers in job.spec.offered if workers <= fitting]
        fewest = offered[0]
        options = () if job.estimate is None else job.estimate.options
        known = {option.workers: option for option in options}
        missing = [workers for workers in (offered[-1], fewest) if workers not in known]
        if missing:
            return fitting, f"{MOST}; its step time with {missing[0]} is unknown"
        base = known[fewest]
        within = [known[workers] for workers in offered if workers in known]
        worth = [one for one in within if _speedup(base, one) * fewest >= MIN_EFFICIENCY * one.workers]
        best = min(worth, key=lambda option: (option.step_ms, option.workers))
        text = f"{best.step_ms:,.4g} ms an iteration ({best.low_ms:,.4g} to {best.high_ms:,.4g})"
        if best is not base:
            text += f", {_speedup(base, best):.2f} × as fast as with {fewest}"
        return best.workers, f"{text}; {fitting} would fit" if best.workers < fitting else text


def _speedup(base: ShapeOption, option: ShapeOption) -> float:
    return base.step_ms / option.step_ms


def range_text(job: JobState) -> str:
    """`1 to 8`."""
    return f"{job.spec.fewest_workers} to {job.spec.workers}"


def _explained(job: JobState, plan: Plan, why: str) -> Plan:
    text = f"{len(plan.nodes)} of {range_text(job)} workers: {why}"
    return replace(plan, explanation=replace(plan.explanation, shape=text[:MAX_TEXT]))
