"""A proposer of placements: plans made on a view of the cell that may be long out of date."""

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import living_places
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.log.port import Partition
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit, ReadVersion
from penstock.model.schema.topics import Topic
from penstock_papers.baselines.baselines import FirstFit
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.machines.log import Broker
from tests.faults.laboratory.world import World

MAX_PLANNED = 4
NAME = "batcher"
WINDOW, STOP = b"penstock.batch_window.opened", b"penstock.stop.decided"
COPIED_WITHIN_S = 60.0


class Proposer:
    """Folds the ledger up to some point, plans a few waiting jobs there, proposes."""

    def __init__(self, world: World, broker: Broker, *, active: bool) -> None:
        self.active = active
        """Whether it plans by itself."""
        self._world = world
        self._broker = broker
        self._replica = Replica()
        self._proposals = 0

    def reads(self, value: bytes) -> None:
        """A valid record has landed. Where jobs wait for a plan or somebody is stopped it plans."""
        world = self._world
        waits = WINDOW in value or STOP in value
        if waits and self.active and not world.calm and world.rng.random() < 0.5:
            world.at(world.delay_s(), self.propose)

    def propose(self) -> None:
        """Nothing, if it sees no job that waits and fits."""
        records = self._broker.records(Partition(Topic.LEDGER, 0))
        if self._replica.offset > len(records):  # the ledger was restored from an older copy
            self._replica = Replica()
        replica = self._replica
        low = replica.offset if self._world.rng.random() < 0.4 else len(records)
        seen = int(self._world.rng.integers(low, len(records) + 1))
        while replica.offset < seen:
            replica.take(records[replica.offset].value, replica.offset)
        state = replica.state
        policy = FirstFit("fifo")
        jobs: list[ProposedJob] = []
        read: list[ReadVersion] = []
        for job in state.jobs.values():
            if job.status is not JobStatus.QUEUED or len(jobs) == MAX_PLANNED:
                continue
            plan = policy.place(state, job, LazyRng(0, "")) if self._world.rng.random() < 0.3 else None
            nodes = plan.nodes if plan is not None else self._blind(state, job)
            if nodes:
                jobs.append(ProposedJob(job_id=job.job_id, nodes=nodes))
                if self._world.rng.random() < 0.5:
                    continue
                read.append(ReadVersion(kind="job", id=job.job_id, version=job.version))
        if not jobs:
            return
        self._proposals += 1
        proposal = PlanProposed(
            proposal_id=f"p{self._proposals}",
            proposer=NAME,
            read=tuple(read),
            units=self._units(jobs),
            valid_until_ms=self._until_ms(state),
        )
        self._send(proposal, self._world.delay_s(), f"{NAME}/{self._proposals}")
        if self._world.rng.random() < 0.4:
            self._send(proposal, self._world.within(0, COPIED_WITHIN_S), f"{NAME}/{self._proposals}/copy")

    def _send(self, proposal: PlanProposed, after_s: float, event_id: str) -> None:
        found = message(proposal, event_id, f"/penstock/{NAME}")
        self._world.at(after_s, lambda: self._broker.put([found]))

    def _until_ms(self, state: CellState) -> int | None:
        """Sometimes over before it lands, sometimes while its units wait."""
        if self._world.rng.random() < 0.5:
            return None
        return max(0, state.now_ms + int(self._world.rng.integers(-2_000, 30_000)))

    def _units(self, jobs: list[ProposedJob]) -> tuple[ProposedUnit, ...]:
        """Of one job each, or of two that start together."""
        units = []
        while jobs:
            size = 2 if self._world.rng.random() < 0.3 else 1
            units.append(ProposedUnit(jobs=tuple(jobs[:size]), explanation="ends sooner"))
            jobs = jobs[size:]
        return tuple(units)

    def _blind(self, state: CellState, job: JobState) -> tuple[str, ...]:
        """As if all GPUs were free: anywhere, or where somebody is being stopped."""
        rng = self._world.rng
        ending = [place.node_id for stopped in state.stopping.values() for place in living_places(stopped)]
        node_ids = ending if ending and rng.random() < 0.7 else list(state.nodes)
        if not node_ids:
            return ()
        if rng.random() < 0.5:
            return (node_ids[int(rng.integers(len(node_ids)))],) * job.demand.tasks
        return tuple(node_ids[int(rng.integers(len(node_ids)))] for _ in range(job.demand.tasks))
