"""Stage profiles per ⟨model, batch size, GPUs⟩ in the ledger: how long one iteration uses storage, CPU, GPU and network.

Only the latest of each counts, and only the MAX_PROFILES that were published last: a cell trains some hundred kinds of jobs.
"""

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.estimates import StagesProfiled

MAX_PROFILES = 2_000  # as many as the estimator has; an older one comes back when it is measured again


def stages_profiled(state: CellState, fact: StagesProfiled) -> None:
    key = _key(fact.model, fact.batch_size, fact.gpus)
    state.stages.pop(key, None)
    state.stages[key] = fact
    if len(state.stages) > MAX_PROFILES:
        del state.stages[next(iter(state.stages))]


def profile_of(state: CellState, job: JobState) -> StagesProfiled | None:
    """Of jobs like this one; None: it names no model or batch size, has no estimate yet, or none was measured."""
    spec = job.spec.shaped(job.workers)
    if spec.model is None or spec.batch_size is None or job.estimate is None:
        return None
    return state.stages.get(_key(spec.model, spec.batch_size, spec.workers * job.estimate.worker.gpus))


def _key(model: str, batch_size: int, gpus: int) -> str:
    return f"{model} {batch_size} {gpus}"
