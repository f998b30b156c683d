"""Place stage of profile `penstock` where nodes reserve cores for their GPUs: as `penstock.policies.together`, and jobs without GPUs borrow what is reserved.

Source: CODA §V-C, as in `penstock.policies.array_place`. Of that only the loan is taken over: where a job without GPUs goes is `together.spare_cores`' choice, which leaves most cores where GPUs
are free, and trainings are placed by their gangs, not by sub-arrays. What is borrowed is marked, so that `penstock.policies.array_reclaim` can take it back.
"""

from penstock.ledger.job_state import JobState
from penstock.ledger.plans import units_of_reclaim
from penstock.ledger.state import CellState
from penstock.policies.array_place import borrowing, reserved_for
from penstock.policies.base import LazyRng, Plan
from penstock.policies.gang import EVERYWHERE
from penstock.policies.together import Together


class Lending(Together):
    """Implements `penstock.policies.base.Policy`."""

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """First on the nodes on which cores are being given back for it."""
        del rng
        own, _ = reserved_for(state, job, units_of_reclaim(state))
        plan = self.place_within(own, state, job) if own else None
        return plan or self.place_within(EVERYWHERE, state, job)

    def place_within(self, nodes: int, state: CellState, job: JobState) -> Plan | None:
        """On these nodes, but for those on which cores are being given back for others."""
        _, others = reserved_for(state, job, units_of_reclaim(state))
        plan = super().place_within(nodes & ~others, state, job)
        return None if plan is None else borrowing(state, job, plan)
