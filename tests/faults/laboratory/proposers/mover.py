"""A migrator and operators: running jobs are asked to go on elsewhere, on a view of the cell that may be out
of date."""

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import MigrationProposed
from penstock.proposals.validate import validate
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.machines.log import Broker
from tests.faults.laboratory.world import World

NAME = "migrator"
TRIES = 12  # targets looked at for one that suits
STALE_AFTER_S = 20.0


class Mover:
    """Looks at the jobs that run and asks for one to be moved."""

    def __init__(self, world: World, broker: Broker) -> None:
        self._world = world
        self._broker = broker
        self._asked = 0

    def move(self, state: CellState) -> str | None:
        """Id of the job; None where nothing runs. Mostly to where it can go, by what is known now; it lands
        later."""
        rng = self._world.rng
        jobs = [job for job in state.jobs.values() if job.status is JobStatus.RUNNING]
        if not jobs or len(state.nodes) < 2:
            return None
        job = jobs[int(rng.integers(len(jobs)))]
        proposal = self._proposal(state, job)
        for _ in range(TRIES if rng.random() < 0.9 else 0):
            if validate(state, proposal).accepted:
                break
            proposal = self._proposal(state, job)
        found = message(proposal, f"{NAME}/{self._asked}", f"/penstock/{NAME}")
        after_s = self._world.within(0, STALE_AFTER_S) if rng.random() < 0.2 else self._world.delay_s()
        for _ in range(2 if rng.random() < 0.1 else 1):
            self._world.at(after_s, lambda: self._broker.put([found]))
        return job.job_id

    def _proposal(self, state: CellState, job: JobState) -> MigrationProposed:
        self._asked += 1
        rng, node_ids = self._world.rng, list(state.nodes)
        one = node_ids[int(rng.integers(len(node_ids)))]
        spread = rng.random() < 0.5
        nodes = tuple(node_ids[int(rng.integers(len(node_ids)))] if spread else one for _ in job.tasks)
        return MigrationProposed(
            proposal_id=f"m{self._asked}",
            proposer=NAME,
            job_id=job.job_id,
            nodes=nodes,
            reason="to empty a node",
        )
