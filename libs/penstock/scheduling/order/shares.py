"""Tenants' shares of a cell, counted from leases: what each holds of GPUs, cores, memory and bandwidth,
and its dominant share.

Every GPU counts once. The tasks of one rank of a group hold one lease: its GPUs, cores and bandwidth count
for its members in equal parts, each member's memory for the member itself. So members of one tenant count
once, and members of several tenants share the lease between them. GPUs and cores of a task that another one
succeeds count for the successor, to which they are promised. What is reserved for a job that moves counts for
that job.

The sum over tenants is what the nodes' leases hold, so the shares of a resource add up to at most 1.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Generic, TypeVar

from penstock.ledger.derived.groups import others
from penstock.ledger.derived.succession import beyond, successors
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement
from penstock.scheduling.order.job_rows import Changes

PARTS = lcm(*range(1, MAX_GROUP_MEMBERS + 1))
"""Parts of a unit: the lease of a group divides into them without remainder, whatever its size."""
GPU = PARTS * WHOLE_GPU  # units of `Amounts` in one
Amounts = tuple[int, int, int, int]
"""GPUs × `GPU`; cores, MiB of host memory and Mbit/s, each × `PARTS`."""
NOTHING: Amounts = (0, 0, 0, 0)  # of any resource
Tenant = TypeVar("Tenant")


def plus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def minus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3]


def capacity(state: CellState) -> Amounts:
    """Total capacity of all nodes that are not gone."""
    total = NOTHING
    for shape, nodes in state.index.shape.items():
        count = (nodes & ~state.index.gone).bit_count() * PARTS
        total = plus(
            total,
            (
                shape.gpus * WHOLE_GPU * count,
                shape.cores * count,
                shape.host_memory_mib * count,
                shape.bandwidth_mbps * count,
            ),
        )
    return total


def amounts(job: JobState) -> Amounts:
    """Demand of the whole gang: what it will hold once it has started alone."""
    demand = job.demand
    workers, worker = demand.workers * PARTS, demand.worker
    servers, server = demand.parameter_servers * PARTS, demand.parameter_server
    return (
        workers * worker.gpus * worker.gpu_share_milli + servers * server.gpus * server.gpu_share_milli,
        workers * worker.cores + servers * server.cores,
        workers * worker.host_memory_mib + servers * server.host_memory_mib,
        workers * worker.bandwidth_mbps + servers * server.bandwidth_mbps,
    )


def leased(state: CellState, job: JobState, gone: Container[str] = frozenset()) -> Amounts:
    """What counts for the job of the leases of its tasks that are not proven ended, and of its reservation.
    O(tasks); for a job that is being stopped or followed O(tasks of its nodes). `gone`: jobs that do not
    count."""
    followed = job.succession.followed or job.status is JobStatus.STOPPING
    gpus = cores = memory_mib = bandwidth_mbps = 0
    for task in job.tasks.values():
        if task.status is TaskStatus.EXITED:
            continue
        place = task.place
        memory_mib += place.host_memory_mib
        if job.sharing.group:
            lease = [place, *others(state, job, place.rank, gone)]
            part = PARTS // len(lease)
            gpus += len({gpu for one in lease for gpu in one.gpus}) * WHOLE_GPU * part
            cores += len({core for one in lease for core in one.cores}) * part
            bandwidth_mbps += max([one.bandwidth_mbps for one in lease]) * part
            continue
        if followed:
            place = beyond(place, list(successors(state, job, place, gone)))
        gpus += len(place.gpus) * place.gpu_share_milli * PARTS
        cores += len(place.cores) * PARTS
        bandwidth_mbps += place.bandwidth_mbps * PARTS
    held = gpus, cores, memory_mib * PARTS, bandwidth_mbps
    return plus(held, _reserved(job)) if job.target else held


def _reserved(job: JobState) -> Amounts:
    """What is reserved for its move beyond what its tasks hold."""
    held = NOTHING
    for node_id in dict.fromkeys(place.node_id for place in job.target):
        for place in taken(job, node_id):
            held = plus(held, _whole(place))
    return held


def _whole(place: TaskPlacement) -> Amounts:
    return (
        len(place.gpus) * place.gpu_share_milli * PARTS,
        len(place.cores) * PARTS,
        place.host_memory_mib * PARTS,
        place.bandwidth_mbps * PARTS,
    )


def owner_of(job: JobState) -> str:
    """The job's tenant."""
    return job.spec.owner


@dataclass(slots=True)
class _Held(Generic[Tenant]):
    """A job and what counted for it at that version."""

    job: JobState
    version: int
    after: tuple[str, ...]
    """Its predecessors: their amounts depend on it."""
    tenant: Tenant
    amounts: Amounts


class Holdings(Generic[Tenant]):
    """What each tenant holds, kept up to date with the changes of jobs; a function of the state alone.

    `tenant_of`: who a job's leases count for. Raises TypeError if that cannot be hashed.
    """

    def __init__(self, tenant_of: Callable[[JobState], Tenant]) -> None:
        self.held: dict[Tenant, Amounts] = {}
        """Tenants that hold anything."""
        self.total = NOTHING
        """The cell's capacity; of a resource of which leases hold more than the nodes still have, so much."""
        self.tenant_of = tenant_of
        self._changes = Changes()
        self._capacity: tuple[int, Amounts] = (-1, NOTHING)
        self.jobs: dict[str, _Held[Tenant]] = {}

    def update(self, state: CellState) -> None:
        """O(changes since the last call)."""
        changed, anew = self._changes.ids(state)
        if anew:
            self.held.clear()
            self.jobs.clear()
        elif not changed and state.capacity_version == self._capacity[0]:
            return
        if anew or state.capacity_version != self._capacity[0]:
            self._capacity = state.capacity_version, capacity(state)
        jobs = self.jobs
        beside: dict[str, None] = {}
        """Jobs whose amounts depend on one that changed."""
        for job_id in changed:
            job, before = state.jobs.get(job_id), jobs.get(job_id)
            if before is not None and before.after:
                beside.update(dict.fromkeys(before.after))
            if job is None or job.status not in HOLDING:
                if before is not None:
                    self._take(before)
                    del jobs[job_id]
            elif job.sharing.group:
                beside.update(dict.fromkeys(state.groups[job.sharing.group]))
            elif before is None or before.version != job.version or before.job is not job:
                if job.succession.after:
                    beside.update(dict.fromkeys(job.succession.after))
                self._enter(state, job, before)
        for job_id in beside:
            job = state.jobs.get(job_id)
            if job is not None and job.status in HOLDING:
                self._enter(state, job, jobs.get(job_id))
        self.total = at_least(self._capacity[1], self.held)

    def share(self, tenant: Tenant) -> float:
        """The tenant's dominant share, 0 … 1, as of the last `update`."""
        held = self.held.get(tenant)
        return 0.0 if held is None else dominant(held, self.total)

    def _enter(self, state: CellState, job: JobState, before: _Held[Tenant] | None) -> None:
        held = leased(state, job)
        if before is not None:
            if before.job is job and before.amounts == held:
                before.version, before.after = job.version, job.succession.after
                return
            self._take(before)
        tenant = self.tenant_of(job)
        self.jobs[job.job_id] = _Held(job, job.version, job.succession.after, tenant, held)
        _add(self.held, tenant, held)

    def _take(self, before: _Held[Tenant]) -> None:
        _add(self.held, before.tenant, minus(NOTHING, before.amounts))


class IfHeld(Generic[Tenant]):
    """What tenants would hold if some jobs ended and others started, for as long as the state stays: jobs of
    now have their leases, those that start their demand."""

    def __init__(self, state: CellState, holdings: Holdings[Tenant]) -> None:
        holdings.update(state)
        self.held = dict(holdings.held)
        """Tenants that hold anything."""
        self._state, self._tenant_of, self._jobs = state, holdings.tenant_of, holdings.jobs
        self._capacity = capacity(state)
        self._ended: set[str] = set()
        self._counted: dict[str, Amounts] = {}
        """Jobs that have started, and those of now for which not their leases count."""

    @property
    def total(self) -> Amounts:
        """As `Holdings.total`."""
        return at_least(self._capacity, self.held)

    def starts(self, job: JobState) -> None:
        """A waiting job holds its demand. O(1)."""
        self._counted[job.job_id] = found = amounts(job)
        _add(self.held, self._tenant_of(job), found)

    def ends(self, job: JobState) -> None:
        """A job holds nothing. O(1), and O(leases) of those that hold the same."""
        before = self._jobs.get(job.job_id)
        if before is None:
            _add(self.held, self._tenant_of(job), minus(NOTHING, self._counted.pop(job.job_id)))
            return
        self._ended.add(job.job_id)
        self._count(before, NOTHING)
        for job_id in (*before.after, *(self._state.groups[job.sharing.group] if job.sharing.group else ())):
            if job_id in self._jobs and job_id not in self._ended:
                other = self._jobs[job_id]
                self._count(other, leased(self._state, other.job, self._ended))

    def _count(self, one: _Held[Tenant], now: Amounts) -> None:
        before = self._counted.get(one.job.job_id, one.amounts)
        self._counted[one.job.job_id] = now
        _add(self.held, one.tenant, minus(now, before))


def _add(held: dict[Tenant, Amounts], tenant: Tenant, more: Amounts) -> None:
    """The tenant holds so much more; a tenant that holds nothing is left out."""
    now = plus(held.get(tenant, NOTHING), more)
    if any(now):
        held[tenant] = now
    else:
        held.pop(tenant, None)


def at_least(total: Amounts, held: Mapping[Tenant, Amounts]) -> Amounts:
    """The larger of a capacity and of what tenants hold together, per resource: a node that shrank has less
    than its tasks hold."""
    gpus, cores, memory, bandwidth = map(max, total, map(sum, zip(NOTHING, *held.values(), strict=True)))
    return gpus, cores, memory, bandwidth


def dominant(held: Amounts, total: Amounts) -> float:
    """The dominant share: the largest share of a resource, 0 … 1."""
    return max(amount / of if of else 0.0 for amount, of in zip(held, total, strict=True))
