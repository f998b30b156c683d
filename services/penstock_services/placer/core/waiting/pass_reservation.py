"""Backfill behind the nodes that are reserved for the first job that does not fit."""

from collections.abc import Iterator

from penstock.ledger.fold.plans import units_of_profile, units_of_proposals, units_of_reclaim
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanAdopted, PlanUnit
from penstock.model.schema.event import Event
from penstock.scheduling.stages.protocols import Choose, Profile
from penstock_services.placer.core.plans import units


class PassReservation:
    """Reservation of one pass over the waiting jobs, for the first that does not fit. `profile.backfill`
    None: no reservation."""

    def __init__(self, profile: Profile) -> None:
        self._stage = profile.backfill
        self._reclaims, self._waits = (
            profile.reclaim is not None,
            profile.shape is not None and profile.shape.waits,
        )
        self.tells_apart = self._stage is not None or self._reclaims or self._waits
        """Whether `alike` tells jobs of equal demands apart."""
        self._unit: PlanUnit | None = None

    def alike(self, state: CellState, job: JobState) -> tuple[object, ...]:
        """Key of jobs with the same result: if one does not fit, no other with the same key does. Those that
        wait for a number of workers of their own, or for which nodes are reserved, are like no other."""
        if (self._reclaims and job.job_id in state.planned) or (
            self._waits and job.spec.min_workers is not None
        ):
            return (job.order,)
        if self._unit is None or self._stage is None:
            return job.demand_key
        return *job.demand_key, self._stage.may_use(state, job, self._unit)

    def chooser(self) -> Choose | None:
        """Replaces the place stage; None: no reservation limits the choice."""
        stage, unit = self._stage, self._unit
        if stage is None or unit is None:
            return None
        return lambda state, job, _rng: stage.beside(state, job, unit)

    def may_start(self, state: CellState, job: JobState) -> bool:
        """Whether a worker fits on a node that is not reserved for a unit of a proposal: a fast test before
        the choice. Without a stage the place stage is always asked: its next choice may depend on the random
        numbers that this one uses."""
        if self._stage is None or job.estimate is None:
            return True
        worker, index = job.estimate.worker, state.index
        if not index.sharing(worker):
            return False  # no node has its GPUs
        fitting = index.candidates(worker, job.spec.where)
        return bool(fitting and fitting & ~units.reserved(state))

    def settled(self, state: CellState) -> bool:
        """Whether nodes are reserved, and no waiting job can start, there or elsewhere."""
        return self._unit is not None and self._stage is not None and not self._stage.any_fits(state)

    def unit(self, state: CellState, job: JobState) -> PlanUnit | None:
        """The nodes to reserve for a job that does not fit; None: none, or they are reserved. A job for which
        capacity is reclaimed has its nodes already."""
        if self._unit is not None or self._stage is None:
            return None
        if job.job_id in state.planned and state.planned[job.job_id] in units_of_reclaim(state):
            return None
        self._unit = self._stage.unit(state, job)
        return None if self._unit is None or _reserved(state) == [self._unit] else self._unit

    def done(self, state: CellState) -> Iterator[Event]:
        """All jobs were tried."""
        if self._stage is not None and self._unit is None and _reserved(state):
            yield PlanAdopted(units=tuple(without_reservation(state)))


def _reserved(state: CellState) -> list[PlanUnit]:
    """Units of this stage: those with an expected time."""
    return [unit for unit in units_of_profile(state) if unit.expected_ms is not None]


def without_reservation(state: CellState) -> list[PlanUnit]:
    """Units of other stages."""
    return [*units_of_proposals(state), *units_of_reclaim(state)]
