"""Stage profiles per ⟨model, batch size, GPUs⟩ in the ledger: how long one iteration uses storage, CPU, GPU
and network.

Only the latest profile per key is stored, and only the MAX_PROFILES published last: a cell trains some
hundred kinds of jobs.
"""

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.nouns.types import StageTimes

MAX_PROFILES = 2_000  # as many as in the estimator; a dropped one is stored again once measured again


def stages_profiled(state: CellState, fact: StagesProfiled) -> None:
    key = _key(fact.model, fact.batch_size, fact.gpus)
    state.stages.pop(key, None)
    state.stages[key] = fact
    if len(state.stages) > MAX_PROFILES:
        del state.stages[next(iter(state.stages))]


def profile_of(state: CellState, job: JobState) -> StagesProfiled | None:
    """The profile of jobs like this one; None: the job names no model or batch size, has no estimate yet, or
    no profile was measured."""
    spec = job.spec.shaped(job.workers)
    if spec.model is None or spec.batch_size is None or job.estimate is None:
        return None
    return state.stages.get(_key(spec.model, spec.batch_size, spec.workers * job.estimate.worker.gpus))


def latest_profile(state: CellState) -> StagesProfiled | None:
    """The profile stored last: if it has changed, `stage_times` may have, too. O(1)."""
    return next(reversed(state.stages.values()), None)


def stage_times(state: CellState, job: JobState) -> StageTimes | None:
    """How long an iteration of this job uses each resource, alone on its GPUs, as far as known; all decisions
    read it here. O(1).

    Order of preference: measured on the same number of GPUs, estimated at the job's submission, measured on
    half or twice as many GPUs (`near_counts`). A new or changed profile applies from its `StagesProfiled`
    record on, also to jobs that already wait or run.
    """
    estimate = job.estimate
    if estimate is None:
        return None
    spec = job.spec.shaped(job.workers)
    if spec.model is None or spec.batch_size is None:
        return estimate.stages
    gpus = spec.workers * estimate.worker.gpus
    exact = state.stages.get(_key(spec.model, spec.batch_size, gpus))
    if exact is None and estimate.stages is not None:
        return estimate.stages
    near = (state.stages.get(_key(spec.model, spec.batch_size, count)) for count in near_counts(gpus))
    found = exact or next((one for one in near if one is not None), None)
    return None if found is None else times_of(found)


def near_counts(gpus: int) -> tuple[int, ...]:
    """GPU counts whose profile is used in place of that of `gpus`, the nearest first: half as many, then
    twice as many, each at least 2.

    With several GPUs each worker does the same work on its batch, and a ring all-reduce sends nearly the
    same, 2 (n - 1) / n of the gradient. A single GPU sends nothing, so its profile replaces no other, and no
    other replaces it.
    """
    half = (gpus // 2,) if gpus % 2 == 0 and gpus >= 4 else ()
    return (*half, 2 * gpus) if gpus >= 2 else ()


def times_of(profile: StagesProfiled) -> StageTimes:
    """The stage times without the fields that plans do not use."""
    return StageTimes(
        storage_ms=profile.storage_ms,
        cpu_ms=profile.cpu_ms,
        gpu_ms=profile.gpu_ms,
        network_ms=profile.network_ms,
        iteration_ms=profile.iteration_ms,
    )


def _key(model: str, batch_size: int, gpus: int) -> str:
    return f"{model} {batch_size} {gpus}"
