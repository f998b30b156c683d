"""Borrowed cores: jobs without GPUs on cores that nodes reserve for their GPUs. Source: CODA §V-C."""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.cluster.assignment import Plan
from penstock.ledger.state.index import set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.scheduling.place.arrays import CPU, array_of


def borrowing(state: CellState, job: JobState, plan: Plan) -> Plan:
    """The plan, marked if a job without GPUs gets cores of the GPU array."""
    lent = _borrowed(state, job, plan) if array_of(job) == CPU else 0
    if not lent:
        return plan
    why = f"borrows {lent} cores that are reserved for GPUs"
    return replace(plan, borrows=True, explanation=replace(plan.explanation, reason=why))


def reserved_for(state: CellState, job: JobState, units: Iterable[PlanUnit]) -> tuple[int, int]:
    """(Set of the nodes that these units reserve for this job, set of those reserved for others)."""
    own = others = 0
    for unit in units:
        found = set_of(state.nodes[node_id].ordinal for node_id in unit.nodes if node_id in state.nodes)
        if unit.job_id == job.job_id:
            own |= found
        else:
            others |= found
    return own, others


def _borrowed(state: CellState, job: JobState, plan: Plan) -> int:
    """Number of cores of the GPU array that the job gets."""
    taken: dict[str, int] = {}
    for node_id, need in zip(plan.nodes, job.demand.needs(), strict=True):
        taken[node_id] = taken.get(node_id, 0) + need.cores
    lent = 0
    for node_id, cores in taken.items():
        unreserved = state.nodes[node_id].entered.unreserved_cores
        lent += max(0, cores - unreserved) if unreserved >= 0 else 0
    return lent
