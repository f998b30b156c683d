"""Reclaim stage of profile `coda`: as in `penstock`, and nodes are reserved for a job that has waited long.
Source: CODA §V-C.

- Departure, so that no job starves: a job that does not fit and has waited `patience_ms` since it queued, one
  of each array, gets nodes reserved, those with most free of what it lacks; no other job starts there. The
  source names no rule.
"""

from penstock.ledger.fold.plans import units_of_profile
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.model.nouns.settings import Coda
from penstock.scheduling.make_room.array_reclaim import ArrayReclaim
from penstock.scheduling.place.arrays import array_of
from penstock.scheduling.place.borrowing import reserved_for
from penstock.scheduling.stages.reclaim import Reclaimed

MANY = 1 << 20  # workers per node as bounded by a resource that a worker does not need


class PatientReclaim(ArrayReclaim):
    """`patience_ms`: nodes are reserved for the first job of an array once it has waited this long without
    fitting, ≥ 0."""

    def __init__(self, settings: Coda, patience_ms: int) -> None:
        super().__init__(settings)
        self._patience_ms = patience_ms

    def reclaim(self, state: CellState, job: JobState) -> Reclaimed | None:
        found = super().reclaim(state, job)
        if found is not None or state.now_ms - (job.queued_ms or 0) < self._patience_ms:
            return found
        array = array_of(job)
        for unit in units_of_profile(state):
            other = state.jobs.get(unit.job_id)
            if other is not None and array_of(other) == array:
                return None
        return _reserved(state, job)

    def idle(self, state: CellState) -> bool:
        """Never: a job without GPUs may be the one that has waited long."""
        return False


def _reserved(state: CellState, job: JobState) -> Reclaimed | None:
    """Nodes large enough for the workers, those with most free of what a worker lacks first; None: too few
    placeable nodes could hold one, or no task runs on them whose end could be awaited."""
    demand, index = job.demand, state.index
    need = demand.worker
    if demand.parameter_servers:
        return None
    suited = (
        index.eligible(need, demand.where)
        & index.placeable
        & ~reserved_for(state, job, state.planned.values())[1]
    )
    rooms: list[tuple[int, int, int, int]] = []
    for ordinal in bits(suited):
        node = state.node(ordinal)
        per = min(
            len(node.spec.gpus) // need.gpus if need.gpus else MANY,
            node.spec.cores // need.cores if need.cores else MANY,
            node.spec.host_memory_mib // need.host_memory_mib if need.host_memory_mib else MANY,
        )
        if per:
            free = node.entered
            rooms.append((-min(free.gpus, need.gpus), -free.cores, ordinal, per))
    nodes: list[str] = []
    for _, _, ordinal, per in sorted(rooms):
        nodes += [state.node_at[ordinal]] * min(per, demand.workers - len(nodes))
    if len(nodes) < demand.workers or not any(state.nodes[node_id].tasks for node_id in nodes):
        return None
    unit = PlanUnit(job_id=job.job_id, nodes=tuple(nodes), expected_ms=state.now_ms)
    return Reclaimed(unit, why=f"has waited {(state.now_ms - (job.queued_ms or 0)) // 1_000:,} s")
