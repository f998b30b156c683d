"""Simulated estimator: the service's own fold of the simulated ledger, tiers and remaining times.

Ideal: the whole estimator. Departures: a job's resources stay as its trace requests them, since job models do
not measure memory; and no models are trained, which takes a service's worker processes minutes. So the run
time of a job comes from the ended runs of the same owner, command, model and batch size, for another number
of iterations from their steps, else from the nearest runs of the same model, else there is none; and the
remaining time of a running job comes from the steps that it reports.
"""

from collections.abc import MutableMapping, Sequence

from msgspec.structs import replace

from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.simulator.services.port import Input
from penstock_services.estimator.core.eta_updates import EtaUpdates
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.resources.estimate import HistoryTier, estimate
from penstock_services.estimator.core.resources.nearest import NearestTier
from penstock_services.estimator.core.step_time.run_time import StepTier


class SimulatedEstimator:
    """A `Service`. `needs`: job → resources in the trace;
    the submitter puts them in, and they are taken out here."""

    writes = Topic.ESTIMATES

    def __init__(self, needs: MutableMapping[str, Estimate]) -> None:
        self._needs = needs
        self._state = state = State(str(Topic.JOBS), 0)
        steps = StepTier(state.history, state.nearest, state.nodes)
        self._steps = steps
        self._tiers = (HistoryTier(state.history), steps, NearestTier(state.nearest))
        self._etas = EtaUpdates(state, steps)

    def answer(self, inputs: Sequence[Input]) -> Sequence[Event]:
        found: list[Event] = []
        for one in inputs:
            if isinstance(one, bytes):
                self._read(one, found)
        return found

    def _read(self, record: bytes, found: list[Event]) -> None:
        state = self._state
        state.fold(record)
        state.finished.clear()  # nothing is stored
        state.stage_rows.clear()
        job_id = next(reversed(state.live), "")  # a record submits one job at most
        if job_id in self._needs and (job := state.live[job_id].job).awaited_estimate is not None:
            found.append(self._estimated(job_id, job.spec))
        while state.stepped:
            if (eta := self._etas.next(state.stepped.popitem()[0])) is not None:
                found.append(eta)

    def _estimated(self, job_id: str, spec: JobSpec) -> JobEstimated:
        need, own = self._needs.pop(job_id), estimate(spec, self._tiers)
        if own.run_ms is not None:
            need = replace(need, run_ms=own.run_ms, source=own.source)
        if spec.min_workers is not None or spec.timed:
            need = replace(need, options=self._steps.options(spec, need.worker.gpus))
        return JobEstimated(job_id=job_id, estimate=need)
