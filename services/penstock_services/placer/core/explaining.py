"""Explanations of placements without a policy's scores: units of plans, proposed or awaiting stops, and
moves."""

from collections.abc import Callable, Sequence

from penstock.cluster.reasons import refusals
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.moves import Move
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import Candidate, Moved, PlacementExplanation
from penstock.model.nouns.token import seq_of
from penstock.model.nouns.types import TaskPlacement

Explain = Callable[[PlacementExplanation], None]
"""Receives the explanations of placements, in their order."""


def explained(
    state: CellState,
    job: JobState,
    tasks: Sequence[TaskPlacement],
    proposer: str,
    reason: str,
    moved: Moved | None = None,
) -> PlacementExplanation:
    """The requested nodes are the only candidate. Of a move also why the other nodes were not candidates.
    `proposer`: empty for the profile."""
    need, models = job.demand.worker, job.demand.where
    fitting = state.index.candidates(need, models)
    rejected: dict[str, int] = {}
    if moved is not None:
        fitting |= state.nodes[tasks[0].node_id].bit  # nodes reserved for it, or held by it, are free
        refused = refusals(state.index, need, models, fitting)
        rejected = {why.value: nodes.bit_count() for why, nodes in refused.items() if nodes}
    return PlacementExplanation(
        job_id=job.job_id,
        profile=state.settings.profile,
        candidates=(Candidate(nodes=tuple(place.node_id for place in tasks), score=0.0),),
        margin=None,
        feasible=fitting.bit_count(),
        rejected=rejected,
        proposer=proposer,
        reason=reason,
        moved=moved,
    )


def leaving(state: CellState, job: JobState) -> Moved:
    """The present placement of a running job that is to be moved."""
    nodes = tuple(task.place.node_id for task in job.tasks.values())
    return Moved(seq=state.seq, attempt=job.attempt, nodes=nodes)


class Stopped:
    """Cost of a moved job's stop. Created when its end is proven, read when it is placed again."""

    def __init__(self, state: CellState, job: JobState, move: Move) -> None:
        self._nodes = tuple(task.place.node_id for task in job.tasks.values())
        self._stop_ms = max(0, state.now_ms - move.at_ms)
        ran_ms = 0 if job.running_ms is None else max(0, move.at_ms - job.running_ms)
        self._worked_ms = job.kept_ms + ran_ms

    def moved(self, job: JobState, move: Move) -> Moved:
        """With the work that the next attempt repeats: the work done when the move was decided, less that in
        its checkpoint."""
        found = job.checkpoint
        unknown = job.spec.checkpoint == "signal" and found is None
        saved = None if found is None or not job.kept_ms else found.iteration
        return Moved(
            seq=seq_of(move.token),
            attempt=move.attempt,
            nodes=self._nodes,
            stop_ms=self._stop_ms,
            lost_ms=None if unknown else max(0, self._worked_ms - job.kept_ms),
            resumes_at=saved,
        )
