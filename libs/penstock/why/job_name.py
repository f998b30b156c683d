"""Jobs as messages name them."""

from penstock.ledger.state.state import CellState
from penstock.model.nouns.job_ids import is_generated

SHORT_CHARS = 12
"""Of an id; commands find a job by them."""


def named(state: CellState, job_id: str) -> str:
    """`nightly (j01hxk2m3nq4)` for an id that the gateway gave; an id that a user chose is a name itself."""
    job = state.jobs.get(job_id)
    return f"{job.spec.name} ({job_id[:SHORT_CHARS]})" if job is not None and is_generated(job_id) else job_id
