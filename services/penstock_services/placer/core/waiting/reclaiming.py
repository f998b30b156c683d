"""Reclaiming of capacity for a job that does not fit: stops and moves are decided, and its nodes are reserved
until it starts."""

from collections.abc import Collection, Iterator, Sequence

from penstock.cluster.reasons import Refusal
from penstock.cluster.view import living_places
from penstock.ledger.fold.evolve_arrays import without_gpus
from penstock.ledger.fold.plans import units_of_profile, units_of_reclaim
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.arrays import CoresReclaimed
from penstock.model.decisions.moves import MoveDecided
from penstock.model.decisions.plans import PlanAdopted, PlanUnit
from penstock.model.schema.event import Event
from penstock.scheduling.acting.validate_moves import target_of
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.reclaim import Reclaimed
from penstock_services.placer.core.common import Explain, continuation, explained, leaving, stop

MAX_RECLAIMS_PER_RECORD = 8  # jobs for which capacity is reclaimed
MAX_STOPS = 64  # jobs stopped for them
MAX_RESERVED = 128  # jobs for which nodes are reserved at once
MAX_TRIED = 8  # jobs with GPUs per pass for which that is tried, in queue order


class Reclaiming:
    """One pass over the waiting jobs. `profile.reclaim` None: nothing is ever reclaimed."""

    def __init__(self, profile: Profile, explain: Explain) -> None:
        self._name = profile.name
        self._stage = profile.reclaim
        self._backfills = profile.backfill is not None
        self._explain = explain
        self._made: set[str] = set()
        self._stopped = self._tried = 0

    def begin(self, state: CellState) -> Iterator[Event]:
        """New sizes, where they have to change."""
        fact = None if self._stage is None else self._stage.sizes(state)
        if fact is not None:
            yield fact

    def arrived(self, state: CellState, job: JobState) -> Iterator[Event]:
        """A job has just queued and finds no node; jobs before it have been refused."""
        found = self.found(state, job)
        if found is not None:
            yield from self.carry_out(state, found)
        yield from self.done(state)

    def found(self, state: CellState, job: JobState) -> Reclaimed | None:
        """What is reclaimed for a job that does not fit; None: nothing."""
        if self._stage is None or job.job_id in state.planned or len(state.planned) >= MAX_RESERVED:
            return None
        self._tried += not without_gpus(job)
        if self._tried > MAX_TRIED or self._full:
            return None
        return self._stage.reclaim(state, job)

    def carry_out(self, state: CellState, found: Reclaimed) -> Iterator[Event]:
        """Reserves the nodes, and stops or moves those that have borrowed."""
        self._made.add(found.unit.job_id)
        yield PlanAdopted(units=(*state.planned.values(), found.unit))
        for move in found.moves:
            yield from self._moves(state, move.job, move.nodes, found)
        for victim in found.stops:
            yield CoresReclaimed(
                job_id=victim.job_id, attempt=victim.attempt, by_job_id=found.unit.job_id, reason=found.why
            )
            yield from stop(state, victim, "preempted")
        self._stopped += len(found.stops) + len(found.moves)

    def due(self, state: CellState, tried: Collection[str]) -> list[JobState]:
        """Jobs that a bounded pass did not reach and for which nothing is awaited: they start now, or their
        reservations end."""
        if self._stage is None:
            return []
        return [
            state.jobs[unit.job_id]
            for unit in units_of_profile(state)
            if unit.job_id not in tried and self._vain(state, unit)
        ]

    def done(self, state: CellState) -> Iterator[Event]:
        """All jobs that can be were tried: reservations end where no awaited event could start the job
        there."""
        if self._stage is None:
            return
        vain = {unit.job_id for unit in units_of_profile(state) if self._vain(state, unit)}
        if vain:
            yield PlanAdopted(units=tuple(unit for unit in state.planned.values() if unit.job_id not in vain))
        if self._full or vain - self._made:
            yield continuation(state)

    def idle(self, state: CellState) -> bool:
        """Whether nothing is reclaimed for any other job of this pass, and no job waits for what was."""
        return self._stage is None or (self._stage.idle(state) and not units_of_reclaim(state))

    @property
    def _full(self) -> bool:
        return len(self._made) >= MAX_RECLAIMS_PER_RECORD or self._stopped >= MAX_STOPS

    def _moves(
        self, state: CellState, job: JobState, nodes: Sequence[str], found: Reclaimed
    ) -> Iterator[Event]:
        target = target_of(state, job.job_id, tuple(nodes))
        if isinstance(target, Refusal):
            return
        self._explain(explained(state, job, target, self._name, found.why, leaving(state, job)))
        yield MoveDecided(
            job_id=job.job_id,
            attempt=job.attempt,
            tasks=target,
            by=f"profile {self._name}",
            reason=f"for {found.unit.job_id}: {found.why}",
            cause="other",
        )
        yield from stop(state, job, "migrated")

    def _vain(self, state: CellState, unit: PlanUnit) -> bool:
        """A node cannot be used, or nothing is awaited there any more: no task's end, or no stop where jobs
        were stopped for it. Of units of the profile, once the job was tried."""
        nodes = [state.nodes.get(node_id) for node_id in unit.nodes]
        if any(node is None or not node.placeable for node in nodes):
            return True
        if (
            unit.expected_ms is not None
        ):  # a backfill reservation ends with the pass in which its job is not the first
            return not self._backfills and not any(node.tasks for node in nodes if node is not None)
        nodes_of_unit = set(unit.nodes)
        leaving_there = (
            place.node_id in nodes_of_unit for job in state.stopping.values() for place in living_places(job)
        )
        return not any(leaving_there)
