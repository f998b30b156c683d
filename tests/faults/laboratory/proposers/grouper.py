"""A batcher that forms groups: waiting jobs are asked to share the GPUs of others, on a view of the cell that
may be out of date."""

from penstock.cluster.view import ClusterView
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.scheduling.groups.validate_groups import RUNS, Formed, formed
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.machines.log import Broker
from tests.faults.laboratory.world import World

NAME = "grouper"
TRIES = 24  # groups looked at for one that can be formed
STALE_AFTER_S = 20.0

Members = list[tuple[str, tuple[str, ...]]]


class Grouper:
    """Looks at who runs and who waits, and asks for one group."""

    def __init__(self, world: World, broker: Broker) -> None:
        self._world = world
        self._broker = broker
        self._asked = 0

    def group(self, state: CellState) -> None:
        """Mostly one that can be formed, now or when all stops are proven, by what is known now; it lands
        later."""
        rng = self._world.rng
        members = self._members(state)
        for _ in range(TRIES if rng.random() < 0.9 else 0):
            if members and isinstance(
                formed(state, members, ClusterView(state, state.stopping.values())), Formed
            ):
                break
            members = self._members(state)
        if not members:
            return
        self._asked += 1
        unit = ProposedUnit(
            jobs=tuple(ProposedJob(job_id=job_id, nodes=nodes) for job_id, nodes in members),
            kind="group",
            explanation="they take turns",
        )
        proposal = PlanProposed(proposal_id=f"g{self._asked}", proposer=NAME, units=(unit,))
        found = message(proposal, f"{NAME}/{self._asked}", f"/penstock/{NAME}")
        after_s = self._world.within(0, STALE_AFTER_S) if rng.random() < 0.2 else self._world.delay_s()
        for _ in range(2 if rng.random() < 0.1 else 1):
            self._world.at(after_s, lambda: self._broker.put([found]))

    def _members(self, state: CellState) -> Members:
        rng = self._world.rng
        runs = [job for job in state.jobs.values() if job.status in RUNS or job.order in state.stopping]
        waits = [job for job in state.jobs.values() if job.status is JobStatus.QUEUED]
        if not waits or not runs:
            return []
        first = runs[int(rng.integers(len(runs)))]
        nodes = tuple(task.place.node_id for task in first.tasks.values())
        members = state.groups.get(first.sharing.group, {first.job_id: first}).values()
        there = [job for job in members if job.status in RUNS]
        alike = [job for job in waits if _alike(job, first)] or waits
        new = [
            alike[int(rng.integers(len(alike)))] for _ in range(2 if rng.random() < 0.3 or not there else 1)
        ]
        return [(job_id, nodes) for job_id in dict.fromkeys(job.job_id for job in (*there, *new))]


def _alike(job: JobState, first: JobState) -> bool:
    need, other = job.demand.worker, first.demand.worker
    return need.gpus == other.gpus and job.spec.parameter_servers == first.spec.parameter_servers
