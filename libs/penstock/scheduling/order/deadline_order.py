"""Stages of profile `penstock` for jobs with a deadline or a service class: GENIE's order and shapes, within
tenants' shares.

Jobs that can still meet their deadline, and urgent ones, come before all others of tenants below their share,
least slack first (`penstock.scheduling.order.genie`). A job that is late already, or whose tenant is at its
share, waits in the usual order (`penstock.scheduling.order.fair`): a deadline gives no tenant more than its
share. Moldable jobs run on the ⟨nodes, GPUs⟩ with the best ratio of speed to cost that meets the deadline,
all others as without this stage.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.deadlines import urgent
from penstock.scheduling.order.fair import FairResponse
from penstock.scheduling.order.genie import Genie
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.place.together import Together
from penstock.scheduling.stages.protocols import Ranking, Shape

TIMED: tuple[()] = ()
"""Key of the only row: jobs with a deadline or a class."""


class DeadlineOrder:
    """A place, order and shape stage in one, around those for jobs without a deadline. Implements `Policy`,
    `Order` and `Shape` of `penstock.scheduling.stages.protocols`."""

    waits = True

    def __init__(self, name: str, place: Together, order: FairResponse, shape: Shape) -> None:
        self.name = name
        self._place, self._order, self._shape = place, order, shape
        self.genie = Genie(name, place)
        self._timed: JobRows[tuple[()]] = JobRows(_timed)

    def may_take(self, state: CellState, job: JobState, other: JobState) -> bool:
        """Whether a waiting job may have the place of a running one: its tenant is below its share, or both
        are of one tenant and the running one has no higher priority."""
        if job.spec.owner == other.spec.owner:
            return job.spec.priority >= other.spec.priority
        return self._order.below_share(state, job.spec.owner)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """As `Policy`."""
        return (self.genie if job.spec.timed else self._place).place(state, job, rng)

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """As `Shape`."""
        return (self.genie if job.spec.timed else self._shape).shape(state, job, fitting)

    def order(self, state: CellState) -> Iterator[str]:
        """As `Order`. O(changes since the last call + waiting jobs with a deadline × options) in addition to
        the usual order; O(1) for a job that waits alone."""
        tried: set[str] = set()
        if len(state.queue) == 1:
            tried.update(alone := tuple(state.queue.values()))
            yield from alone
            if tried.issuperset(state.queue.values()):
                return
        self._timed.update(state)
        timed = (job_id for _, _, job_id, _ in self._timed.waiting.get(TIMED, ()) if job_id not in tried)
        for job in self._pressing(state, map(state.jobs.__getitem__, timed)):
            if self._order.below_share(state, job.spec.owner):
                tried.add(job.job_id)
                yield job.job_id
        usual = self._order.order(state)
        yield from (job_id for job_id in usual if job_id not in tried) if tried else usual

    def ranking(self, state: CellState, waiting: Iterable[JobState] | None = None) -> Ranking:
        """As `Order`."""
        if waiting is None:
            self._timed.update(state)
            timed = [state.jobs[job_id] for _, _, job_id, _ in self._timed.waiting.get(TIMED, ())]
        else:
            waiting = list(waiting)
            timed = [job for job in waiting if job.spec.timed]
        return self._order.ranking(state, waiting, self._pressing(state, timed))

    def claim(self, state: CellState, job: JobState) -> str:
        """As `Order`."""
        usual = self._order.claim(state, job)
        return f"{self.genie.claim(state, job)}; {usual}" if job.spec.timed else usual

    def _pressing(self, state: CellState, timed: Iterable[JobState]) -> Sequence[JobState]:
        """Of the jobs with a deadline the urgent ones and those that can meet it, least slack first."""
        found = []
        for job in timed:
            allowance = self.genie.choice(state, job).allowance_ms
            if urgent(job.spec) or 0 <= allowance < inf:
                found.append((allowance, job.order, job))
        return [job for _, _, job in sorted(found, key=lambda one: one[:2])]


def _timed(state: CellState, job: JobState) -> tuple[tuple[()], float] | None:
    """Sort key of a job among those with a deadline or a class; None: it has neither."""
    return (TIMED, float(job.order)) if job.spec.timed else None
