"""Place stage of profile `penstock` with core lending: as `penstock.scheduling.place.together`, and jobs
without GPUs borrow cores that nodes reserve for their GPUs.

Source: CODA §V-C, as in `penstock_papers.coda.array_place`. Only the lending is taken from it:
`together.spare_cores` chooses the node of a job without GPUs, so that most cores stay free where GPUs are
free, and training jobs are placed by their gangs, not by sub-arrays. A job that borrows is marked, so that
`penstock.scheduling.make_room.array_reclaim` can reclaim the cores.
"""

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import EVERYWHERE
from penstock.ledger.fold.plans import units_of_reclaim
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.place.borrowing import borrowing, reserved_for
from penstock.scheduling.place.together import Together


class Lending(Together):
    """Implements `penstock.scheduling.stages.protocols.Policy`."""

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Tries first the nodes on which cores are being reclaimed for the job."""
        del rng
        own, _ = reserved_for(state, job, units_of_reclaim(state))
        plan = self.place_within(own, state, job) if own else None
        return plan or self.place_within(EVERYWHERE, state, job)

    def place_within(self, nodes: int, state: CellState, job: JobState) -> Plan | None:
        """Places the job on these nodes, except those on which cores are being reclaimed for other jobs."""
        _, others = reserved_for(state, job, units_of_reclaim(state))
        plan = super().place_within(nodes & ~others, state, job)
        return None if plan is None else borrowing(state, job, plan)
