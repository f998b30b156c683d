"""The protocol of placement policies, and what turns their answer into a decision.

A policy chooses nodes; unless it names the GPUs, too, they are chosen here, and so are the cores (lowest free
first), so that all policies leave the node equally little choice. A policy reads the state and writes nothing.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from penstock.ledger.demand import Demand, DemandKey
from penstock.ledger.job_state import JobState
from penstock.ledger.masks import take_lowest
from penstock.ledger.memory import cap_of
from penstock.ledger.node_state import NodeState
from penstock.ledger.state import CellState
from penstock.model.ledger_events import JobRank, PlacementDecided, PlacementExplanation
from penstock.model.plans import PlanUnit
from penstock.model.proposals import PlanProposed
from penstock.model.types import WHOLE_GPU, ResourceVector, Role, TaskPlacement
from penstock.policies.batch import Batch
from penstock.policies.guard import Guard
from penstock.policies.migrate import Migrate
from penstock.policies.reclaim import Reclaim
from penstock.policies.regroup import Regroup


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Where a whole gang goes."""

    nodes: tuple[str, ...]
    """Node id per task in rank order: workers 0 … w−1, then parameter servers."""
    explanation: PlacementExplanation
    gpus: tuple[tuple[int, ...], ...] | None = None
    """The GPUs of each task in rank order, if the policy chooses them; else `assign` does."""
    borrows: bool = False
    """As `PlacementDecided.borrows`."""


class LazyRng:
    """Random generator, seeded anew for each input event from (run seed, event id): equal in every replay."""

    def __init__(self, run_seed: int, event_id: str = "") -> None:
        self.used = False
        """Whether random numbers were ever asked for: if not, nothing depends on the seed."""
        self._run_seed = run_seed
        self.seed(event_id)

    def seed(self, event_id: str) -> None:
        """The next event begins."""
        self._event_id = event_id
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        """Made at first use: most policies use no random numbers."""
        if self._generator is None:
            self.used = True
            entropy = (self._run_seed, *self._event_id.encode())
            self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        return self._generator


Choose = Callable[[CellState, JobState, LazyRng], Plan | None]
"""As `Policy.place`."""


class Policy(Protocol):
    """Chooses nodes for a gang, all or nothing."""

    @property
    def name(self) -> str:
        """The profile's name."""
        ...

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """The chosen nodes, or None when the gang does not fit now. Must not look at more nodes than it needs."""
        ...


class Shape(Protocol):
    """A stage of a profile: how many workers a moldable job starts with."""

    @property
    def waits(self) -> bool:
        """Whether a job waits for that many though it could start with fewer; for forecasts."""
        ...

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """(workers, why in words), for a job that is about to be placed: from its fewest to `fitting`, the most that fit now."""
        ...


Turns = Generator[JobState, bool, None]
"""Jobs that wait, each in its turn; `send` says whether the one given last has started."""


class Order(Protocol):
    """A stage of a profile: an order of its own for the waiting jobs; who runs stays."""

    def order(self, state: CellState) -> Iterator[str]:
        """Ids of waiting jobs in the order in which they are to be tried, none twice.

        Goes on after each try from the state as it then is: the job given last has been placed, or it waits on.
        """
        ...

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """As `order` would be if at `at_ms` these jobs waited and those held resources; one that does not start is followed by all that may pass it.

        For `why` and forecasts: it looks at all of them, and knows nothing from before.
        """
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """What a job's place in that order rests on, in words; for `why`."""
        ...


class Selection(msgspec.Struct, frozen=True, gc=False):
    """Who shall run now, as differences from who runs."""

    claims: tuple[str, ...] = ()
    """Ids of jobs that wait, or are being stopped, and shall run; first claim first."""
    stops: tuple[str, ...] = ()
    """Ids of jobs that run and shall not; last claim first."""
    ranks: tuple[JobRank, ...] = ()
    """Changes of the policy's own order; written into the ledger, so that the next plan finds them."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change although nothing happens; None: it does not."""


NO_LIMITS: Mapping[DemandKey, int] = MappingProxyType({})


class Preemption(Protocol):
    """A stage of a profile: chooses anew who runs, whoever runs now; where, is the place stage's.

    The placer asks once for all inputs of a moment. The same state must give the same answer, and carrying a
    plan out must not change it: stops take time, and the stage is asked again when they are proven.
    """

    def select(self, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        """Judged by numbers of GPUs only, as if every job that may run could be moved; what is stopped counts as free.

        `at_most`: so many jobs of these demands fit on the nodes, whoever else is stopped; no more of them are chosen.
        """
        ...

    def later(self, state: CellState, job: JobState) -> Iterator[JobState]:
        """Running jobs whose claim comes after this job's, last claim first: they may be stopped for it."""
        ...

    def ranking(self, state: CellState) -> Sequence[str]:
        """Ids of all jobs that may run, first claim first, whether they fit or not; for `why`."""
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """What a job's place in that order rests on, in words; for `why`."""
        ...


class Backfill(Protocol):
    """A stage of a profile beside `Order`: keeps nodes for the first job in order that does not fit, and lets others run there meanwhile."""

    def unit(self, state: CellState, job: JobState) -> PlanUnit | None:
        """The nodes that are kept for it; None: none, and it holds up nobody. Gives the same answer until it is no longer right."""
        ...

    def may_use(self, state: CellState, job: JobState, kept: PlanUnit) -> bool:
        """Whether the job may start on these nodes meanwhile."""
        ...

    def beside(self, state: CellState, job: JobState, kept: PlanUnit) -> Plan | None:
        """As `Policy.place`, not on these nodes unless it may use them."""
        ...


class GiveWay(Protocol):
    """A stage of a profile beside `Order`: running jobs that make way for others, and go on elsewhere or with fewer workers."""

    def plan(self, state: CellState) -> PlanProposed | None:
        """Who makes way for whom, and where both go, as a plan with stops of this profile; None: it pays for none."""
        ...


class Profile(NamedTuple):
    """What a name stands for: the stages that decide who runs, when and where. One that is None is the placer's own.

    Without `preempt` nobody is stopped, and jobs are tried as things happen: in the order of `order`, or first come, first
    served with a bounded window for backfill. Without `shape` a moldable job starts with as many workers as fit.
    """

    name: str
    place: Policy
    order: Order | None = None
    preempt: Preemption | None = None
    backfill: Backfill | None = None
    shape: Shape | None = None
    regroup: Regroup | None = None
    """Who runs and who shares GPUs is planned by the batcher (`penstock.policies.regroup`); the other stages serve until its plan comes, or where none comes."""
    batch: Batch | None = None
    """Where the jobs of a burst start is planned by the batcher (`penstock.policies.batch`) while a batch window is open."""
    migrate: Migrate | None = None
    """Who of those that run goes on elsewhere is proposed by the migrator (`penstock.policies.migrate`)."""
    make_way: GiveWay | None = None
    """Who of those that run makes way for one that waits. Not beside `preempt` or `regroup`, which stop jobs by themselves."""
    guard: Guard | None = None
    """Whose cores and memory bandwidth the contention-guard changes while they run (`penstock.policies.guard`); the setting `contention` goes before it."""
    reclaim: Reclaim | None = None
    """Who gives back what it has borrowed for a job that does not fit (`penstock.policies.reclaim`); beside `order`."""
    prelaunch: bool = False
    """Whether jobs may launch where others come to their end by themselves (`penstock.policies.prelaunch`); False: as sources that do not know it."""
    beside_stops: bool = True
    """Whether jobs that fit beside others that are still being stopped start at once. False: as sources that know no stop that takes time."""


def task_id_of(job: JobState, rank: int) -> str:
    """The id of this rank's task in the job's next attempt: `job.attempt.w0`, …, `job.attempt.ps0`, …"""
    workers = job.workers
    role = f"w{rank}" if rank < workers else f"ps{rank - workers}"
    return f"{job.job_id}.{job.attempt + 1}.{role}"


def assign(state: CellState, job: JobState, plan: Plan) -> PlacementDecided:
    """The decision for a plan made on this very state: GPU ids, cores and caps, lowest free first.

    A moldable job has as many workers as the plan has nodes.
    """
    if job.spec.min_workers is not None:
        job = job.shaped(len(plan.nodes))
    demand = job.demand
    meet = len(set(plan.nodes)) < len(plan.nodes)  # some on one node: each finds less than the one before
    nodes: dict[str, NodeState] = {}
    tasks: list[TaskPlacement] = []
    for rank, node_id in enumerate(plan.nodes):
        node = nodes.get(node_id) or state.nodes[node_id]
        place = place_on(node, job, demand, rank, None if plan.gpus is None else plan.gpus[rank])
        tasks.append(place)
        if meet:
            nodes[node_id] = nodes.get(node_id) or node.copy()
            nodes[node_id].give(place)
    return PlacementDecided(
        job_id=job.job_id, attempt=job.attempt + 1, tasks=tuple(tasks), borrows=plan.borrows
    )


def place_on(
    node: NodeState,
    job: JobState,
    demand: Demand,
    rank: int,
    gpus: tuple[int, ...] | None = None,
    core_mask: int | None = None,
) -> TaskPlacement:
    """The place of one task of the job's next attempt on a node that can take it. `gpus`: None where they are chosen here; `core_mask`: of which it
    gets the lowest, None: of the node's free ones.

    A share goes to the partly given GPU with the least left that holds it (ties: the lowest index), else to the
    lowest wholly free one.
    """
    role: Role = "worker" if rank < demand.workers else "ps"
    need = demand.worker if role == "worker" else demand.parameter_server
    if gpus is None and need.gpu_share_milli == WHOLE_GPU:
        gpus = take_lowest(node.healthy_gpu_mask, need.gpus)
    elif gpus is None:
        gpus = (_share(node, need),)
    return TaskPlacement(
        task_id=task_id_of(job, rank),
        role=role,
        rank=rank,
        node_id=node.spec.node_id,
        gpus=gpus,
        cores=take_lowest(node.free_core_mask if core_mask is None else core_mask, need.cores),
        host_memory_mib=need.host_memory_mib,
        gpu_memory_mib=need.gpu_memory_mib if need.gpus else 0,
        bandwidth_mbps=need.bandwidth_mbps,
        gpu_share_milli=need.gpu_share_milli,
        host_memory_cap_mib=cap_of(node.spec, need, role, job.estimate),
    )


def _share(node: NodeState, need: ResourceVector) -> int:
    """The GPU that a share goes to."""
    held = [
        (share, gpu)
        for gpu, share in node.offered.items()
        if share.holds(need) and not node.faulted_gpu_mask >> gpu & 1
    ]
    return min(held)[1] if held else take_lowest(node.healthy_gpu_mask, 1)[0]
