"""Interfaces of scheduling policies: the protocols of a profile's stages, and the conversion of a plan into a placement decision.

A policy chooses nodes. GPUs, unless the policy names them, and cores are chosen here (lowest free
first), so that no policy leaves a choice to the node. A policy reads the state and writes nothing.
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
    """Placement of a whole gang."""

    nodes: tuple[str, ...]
    """Node id per task in rank order: workers 0 … w−1, then parameter servers."""
    explanation: PlacementExplanation
    gpus: tuple[tuple[int, ...], ...] | None = None
    """The GPUs of each task in rank order, if the policy chooses them; else `assign` chooses them."""
    borrows: bool = False
    """See `PlacementDecided.borrows`."""


class LazyRng:
    """Random generator, seeded anew for each input event from (run seed, event id): equal in every replay."""

    def __init__(self, run_seed: int, event_id: str = "") -> None:
        self.used = False
        """Whether any random number was used: if not, no decision depends on the seed."""
        self._run_seed = run_seed
        self.seed(event_id)

    def seed(self, event_id: str) -> None:
        """Begins the next event."""
        self._event_id = event_id
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        """The generator, created at first use: most policies use no random numbers."""
        if self._generator is None:
            self.used = True
            entropy = (self._run_seed, *self._event_id.encode())
            self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        return self._generator


Choose = Callable[[CellState, JobState, LazyRng], Plan | None]
"""Signature of `Policy.place`."""


class Policy(Protocol):
    """Chooses nodes for a gang, all or nothing."""

    @property
    def name(self) -> str:
        """The profile's name."""
        ...

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """The chosen nodes, or None when the gang does not fit now. Must not examine more nodes than necessary."""
        ...


class Shape(Protocol):
    """A stage of a profile: how many workers a moldable job starts with."""

    @property
    def waits(self) -> bool:
        """Whether a job waits for that many workers though it could start with fewer; for forecasts."""
        ...

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """(workers, reason as text), for a job that is about to be placed: from its minimum to `fitting`, the most that fit now; more: it waits for them."""
        ...


Turns = Generator[JobState, bool, None]
"""Waiting jobs, each in its turn; `send` reports whether the last one has started."""


class Order(Protocol):
    """A stage of a profile: its own order of the waiting jobs; running jobs are not stopped."""

    def order(self, state: CellState) -> Iterator[str]:
        """Ids of waiting jobs in the order in which they are tried, none twice.

        Continues after each try from the then current state: the last job has been placed, or still waits.
        """
        ...

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """The order if at `at_ms` the jobs `waiting` waited and the jobs `holding` held resources; a job that does not start is followed by all that may overtake it.

        For `why` and forecasts: it examines all jobs and uses no cache.
        """
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """The reason for a job's position in that order, as text; for `why`."""
        ...


class Selection(msgspec.Struct, frozen=True, gc=False):
    """Which jobs shall run now, as differences from the running ones."""

    claims: tuple[str, ...] = ()
    """Ids of jobs that wait, or are being stopped, and shall run; highest priority first."""
    stops: tuple[str, ...] = ()
    """Ids of jobs that run and shall not; lowest priority first."""
    ranks: tuple[JobRank, ...] = ()
    """Changes of the policy's own order; written to the ledger, so that the next plan reads them."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change without an event; None: it does not."""


NO_LIMITS: Mapping[DemandKey, int] = MappingProxyType({})


class Preemption(Protocol):
    """A stage of a profile: selects the jobs that run, and may preempt running ones; the place stage chooses the nodes.

    The placer asks once for all inputs of one ledger time. The same state must give the same answer, and carrying a
    plan out must not change it: stops take time, and the stage is asked again when they are proven.
    """

    def select(self, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        """Selects by numbers of GPUs only, as if every job that may run could be moved; GPUs of stopped jobs count as free.

        `at_most`: how many jobs of a demand fit on the nodes, whichever others are stopped; no more of them are selected.
        """
        ...

    def later(self, state: CellState, job: JobState) -> Iterator[JobState]:
        """Running jobs with a lower priority than this job, lowest first: they may be stopped for it."""
        ...

    def ranking(self, state: CellState) -> Sequence[str]:
        """Ids of all jobs that may run, highest priority first, whether they fit or not; for `why`."""
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """The reason for a job's position in that order, as text; for `why`."""
        ...


class Backfill(Protocol):
    """A stage of a profile beside `Order`: reserves nodes for the first job in order that does not fit, and lets others run there meanwhile."""

    def unit(self, state: CellState, job: JobState) -> PlanUnit | None:
        """The nodes reserved for the job; None: none, and it blocks no other job. Gives the same answer until that is no longer correct."""
        ...

    def may_use(self, state: CellState, job: JobState, unit: PlanUnit) -> bool:
        """Whether the job may start on these nodes meanwhile."""
        ...

    def beside(self, state: CellState, job: JobState, unit: PlanUnit) -> Plan | None:
        """As `Policy.place`, but not on these nodes unless the job may use them."""
        ...

    def any_fits(self, state: CellState) -> bool:
        """Whether a node has room for a worker of any waiting job: else no job can start, in whatever order they are tried."""
        ...


class GiveWay(Protocol):
    """A stage of a profile beside `Order`: running jobs make way for others, and resume elsewhere or with fewer workers."""

    def plan(self, state: CellState) -> PlanProposed | None:
        """Which jobs make way for which, and where both are placed, as a plan with stops of this profile; None: no such plan has a benefit."""
        ...


class Profile(NamedTuple):
    """A scheduling profile: the stages that decide which jobs run, when and where. For a stage that is None the placer's default applies.

    Without `preempt` no job is stopped, and jobs are tried at each event: in the order of `order`, or first come, first
    served with a bounded window for backfill. Without `shape` a moldable job starts with as many workers as fit.
    """

    name: str
    place: Policy
    order: Order | None = None
    preempt: Preemption | None = None
    backfill: Backfill | None = None
    shape: Shape | None = None
    regroup: Regroup | None = None
    """The batcher plans which jobs run and which share GPUs (`penstock.policies.regroup`); the other stages apply until its plan arrives, or if none arrives."""
    batch: Batch | None = None
    """The batcher plans where the jobs of a burst start (`penstock.policies.batch`) while a batch window is open."""
    migrate: Migrate | None = None
    """The migrator proposes which running jobs resume elsewhere (`penstock.policies.migrate`)."""
    make_way: GiveWay | None = None
    """Which running jobs make way for a waiting one. Not beside `preempt` or `regroup`, which stop jobs by themselves."""
    guard: Guard | None = None
    """For which running jobs the contention-guard changes cores and memory bandwidth (`penstock.policies.guard`); the setting `contention` overrides it."""
    reclaim: Reclaim | None = None
    """From which jobs borrowed resources are reclaimed for a job that does not fit (`penstock.policies.reclaim`); beside `order`."""
    prelaunch: bool = False
    """Whether jobs may launch on GPUs of jobs that are about to end by themselves (`penstock.policies.prelaunch`); False: as in sources without this."""
    beside_stops: bool = True
    """Whether jobs that fit beside others that are still being stopped start at once. False: as in sources in which stops take no time."""


def task_id_of(job: JobState, rank: int) -> str:
    """The id of this rank's task in the job's next attempt: `job.attempt.w0`, …, `job.attempt.ps0`, …"""
    workers = job.workers
    role = f"w{rank}" if rank < workers else f"ps{rank - workers}"
    return f"{job.job_id}.{job.attempt + 1}.{role}"


def assign(state: CellState, job: JobState, plan: Plan) -> PlacementDecided:
    """The decision for a plan made on exactly this state: GPU ids, cores and caps, lowest free first.

    A moldable job has as many workers as the plan has nodes.
    """
    if job.spec.min_workers is not None:
        job = job.shaped(len(plan.nodes))
    demand = job.demand
    meet = len(set(plan.nodes)) < len(plan.nodes)  # on one node each finds less than the one before
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
    """The place of one task of the job's next attempt on a node that can take it. `gpus`: None where they are chosen here; `core_mask`: it
    gets the lowest of these cores, None: of the node's free ones.

    A share is placed on the partly allocated GPU with the least free that holds it (best fit; ties: the lowest index), else on the
    lowest wholly free one.
    """
    role: Role = "worker" if rank < demand.workers else "ps"
    need = demand.worker if role == "worker" else demand.parameter_server
    if gpus is None and need.gpu_share_milli == WHOLE_GPU:
        gpus = _whole(node, job, need.gpus)
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
        host_memory_cap_mib=cap_of(node, job, need, role),
    )


def _whole(node: NodeState, job: JobState, count: int) -> tuple[int, ...]:
    """The lowest free GPUs, without those on which attempts failed, if there are enough."""
    free = node.healthy_gpu_mask
    failed = job.failed_on.get(node.spec.node_id, 0) if job.failed_on else 0
    if node.distrust is not None:
        failed |= node.distrust.failed_gpu_mask
    if failed and (free & ~failed).bit_count() >= count:
        free &= ~failed
    return take_lowest(free, count)


def _share(node: NodeState, need: ResourceVector) -> int:
    """The GPU for a share."""
    held = [
        (share, gpu)
        for gpu, share in node.offered.items()
        if share.holds(need) and not node.unusable_gpu_mask >> gpu & 1
    ]
    return min(held)[1] if held else take_lowest(node.healthy_gpu_mask, 1)[0]
