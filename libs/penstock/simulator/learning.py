"""Run times as the estimator learns them: its own fold of the simulated ledger, and its own tiers.

Ideal: the whole estimator. Departure: what a job needs stays as its trace asks for it, since no job model uses cores or memory;
and no step-time model answers, since simulated jobs report no iterations. So a run time comes from the ended runs of the same
owner, command, model and batch size, else from the nearest runs of the same model, else there is none.
"""

from penstock.model.topics import Topic
from penstock.model.types import Estimate, JobSpec
from penstock_services.estimator.core.resources.estimate import HistoryTier, estimate
from penstock_services.estimator.core.resources.nearest import NearestTier
from penstock_services.estimator.core.state import State


class RunTimes:
    """`read` every record; `of` answers by all that was read."""

    def __init__(self) -> None:
        self._state = State(str(Topic.JOBS), 0)
        self._tiers = (HistoryTier(self._state.history), NearestTier(self._state.nearest))

    def read(self, value: bytes) -> None:
        """One record of the ledger."""
        self._state.fold(value)
        self._state.finished.clear()  # nothing is stored

    def of(self, spec: JobSpec) -> Estimate:
        """The estimate whose run time, source and confidence count; `run_ms` is None where nothing is known."""
        return estimate(spec, self._tiers)
