"""A proposer of placements: plans made on a view of the cell that may be long out of date."""

from penstock.ledger.replica import Replica
from penstock.ledger.state import CellState, JobState
from penstock.log.port import Partition
from penstock.model.proposals import JobPlan, PlanProposed, ReadVersion
from penstock.model.topics import Topic
from penstock.model.transitions import JobStatus
from penstock.model.types import TaskPlacement
from penstock.policies.base import LazyRng, assign, task_id_of
from penstock.policies.baselines import FirstFit
from tests.faults.laboratory.log import Broker
from tests.faults.laboratory.wire import message
from tests.faults.laboratory.world import World

MAX_PLANS = 3
NAME = "batcher"


class Proposer:
    """Folds the ledger up to some point, plans a few waiting jobs there, proposes."""

    def __init__(self, world: World, broker: Broker) -> None:
        self._world = world
        self._broker = broker
        self._replica = Replica()
        self._proposals = 0

    def propose(self) -> None:
        """Nothing, if it sees no job that waits and fits."""
        records = self._broker.records(Partition(Topic.LEDGER, 0))
        if self._replica.offset > len(records):  # the ledger was restored from an older copy
            self._replica = Replica()
        replica = self._replica
        seen = int(self._world.rng.integers(replica.offset, len(records) + 1))
        while replica.offset < seen:
            replica.take(records[replica.offset].value, replica.offset)
        state = replica.state
        policy = FirstFit("fifo")
        plans: list[JobPlan] = []
        read: list[ReadVersion] = []
        for job in state.jobs.values():
            if job.status is not JobStatus.QUEUED or len(plans) == MAX_PLANS:
                continue
            plan = policy.place(state, job, LazyRng(0, "")) if self._world.rng.random() < 0.4 else None
            tasks = assign(state, job, plan).tasks if plan is not None else self._blind(state, job)
            if tasks:
                plans.append(JobPlan(job_id=job.job_id, tasks=tasks))
                if self._world.rng.random() < 0.5:
                    continue
                read.append(ReadVersion(kind="job", id=job.job_id, version=job.version))
        if not plans:
            return
        self._proposals += 1
        proposal = PlanProposed(
            proposal_id=f"p{self._proposals}",
            proposer=NAME,
            read=tuple(read),
            kind="batch",
            plans=tuple(plans),
        )
        found = message(proposal, f"{NAME}/{self._proposals}", f"/penstock/{NAME}")
        self._world.at(self._world.delay_s(), lambda: self._broker.put([found]))

    def _blind(self, state: CellState, job: JobState) -> tuple[TaskPlacement, ...]:
        """Anywhere, as if all GPUs were free. The highest cores: the placer gives out the lowest, so they mostly are."""
        node_ids = list(state.nodes)
        if not node_ids:
            return ()
        chosen = [
            state.nodes[node_ids[int(self._world.rng.integers(len(node_ids)))]].spec
            for _ in job.demand.needs()
        ]
        return tuple(
            TaskPlacement(
                task_id=task_id_of(job, rank),
                role="worker" if rank < job.spec.workers else "ps",
                rank=rank,
                node_id=spec.node_id,
                gpus=tuple(range(need.gpus)),
                cores=tuple(range(max(0, spec.cores - need.cores), spec.cores)),
                host_memory_mib=need.host_memory_mib,
                gpu_memory_mib=need.gpu_memory_mib if need.gpus else 0,
                bandwidth_mbps=need.bandwidth_mbps,
                gpu_share_milli=need.gpu_share_milli,
            )
            for rank, (need, spec) in enumerate(zip(job.demand.needs(), chosen, strict=True))
        )
