"""Tenants' shares of a cell: amounts of each resource that tenants hold or want, and their dominant share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU
from penstock.scheduling.order.job_rows import Changes

Amounts = tuple[int, int, int, int]
"""Thousandths of GPUs, cores, MiB of host memory, Mbit/s."""


NOTHING: Amounts = (0, 0, 0, 0)


def plus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def minus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3]


def capacity(state: CellState) -> Amounts:
    """Total capacity of all nodes that are not gone."""
    total = NOTHING
    for shape, nodes in state.index.shape.items():
        count = (nodes & ~state.index.gone).bit_count()
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
    """Demand of the whole gang."""
    demand = job.demand
    workers, worker = demand.workers, demand.worker
    servers, server = demand.parameter_servers, demand.parameter_server
    return (
        workers * worker.gpus * worker.gpu_share_milli + servers * server.gpus * server.gpu_share_milli,
        workers * worker.cores + servers * server.cores,
        workers * worker.host_memory_mib + servers * server.host_memory_mib,
        workers * worker.bandwidth_mbps + servers * server.bandwidth_mbps,
    )


def wanted(jobs: Iterable[JobState]) -> dict[str, Amounts]:
    """Owner → demand of the owner's jobs among these."""
    found: dict[str, Amounts] = {}
    for job in jobs:
        found[job.spec.owner] = plus(found.get(job.spec.owner, NOTHING), amounts(job))
    return found


@dataclass(slots=True)
class _Held:
    """A job and what it held at that version."""

    job: JobState
    version: int
    owner: str
    amounts: Amounts


class Holdings:
    """What the jobs of each owner hold. `of`: what one job does; it changes with the job's version alone."""

    def __init__(self, of: Callable[[JobState], Amounts]) -> None:
        self.by_owner: dict[str, Amounts] = {}
        self._of = of
        self._changes = Changes()
        self._jobs: dict[str, _Held] = {}

    def update(self, state: CellState) -> None:
        """O(changes since the last call)."""
        changed, anew = self._changes.ids(state)
        if anew:
            self.by_owner.clear()
            self._jobs.clear()
        jobs = self._jobs
        for job_id in changed:
            job, before = state.jobs.get(job_id), jobs.get(job_id)
            if job is None or job.status not in HOLDING:
                if before is not None:
                    self._take(before)
                    del jobs[job_id]
            elif before is None:
                jobs[job_id] = self._give(job, self._of(job))
            elif before.version != job.version or before.job is not job:
                held = self._of(job)
                if before.job is job and before.amounts == held:
                    before.version = job.version
                else:
                    self._take(before)
                    jobs[job_id] = self._give(job, held)

    def _give(self, job: JobState, held: Amounts) -> _Held:
        owner = job.spec.owner
        self.by_owner[owner] = plus(self.by_owner.get(owner, NOTHING), held)
        return _Held(job, job.version, owner, held)

    def _take(self, before: _Held) -> None:
        left = minus(self.by_owner.get(before.owner, NOTHING), before.amounts)
        if any(left):
            self.by_owner[before.owner] = left
        else:
            self.by_owner.pop(before.owner, None)


def dominant(held: Amounts, total: Amounts) -> float:
    """The dominant share: the largest share of a resource, 0 … 1."""
    return max(amount / of if of else 0.0 for amount, of in zip(held, total, strict=True))
