"""The protocol of placement policies, and what turns their answer into a decision.

A policy chooses nodes; unless it names the GPUs, too, they are chosen here, and so are the cores (lowest free
first), so that all policies leave the node equally little choice. A policy reads the state and writes nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from penstock.ledger.masks import take_lowest
from penstock.ledger.memory import cap_of
from penstock.ledger.state import CellState, JobState, NodeState
from penstock.model.ledger_events import JobRank, PlacementDecided, PlacementExplanation
from penstock.model.types import WHOLE_GPU, ResourceVector, TaskPlacement


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Where a whole gang goes."""

    nodes: tuple[str, ...]
    """Node id per task in rank order: workers 0 … w−1, then parameter servers."""
    explanation: PlacementExplanation
    gpus: tuple[tuple[int, ...], ...] | None = None
    """The GPUs of each task in rank order, if the policy chooses them; else `assign` does."""


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


class Policy(Protocol):
    """Chooses nodes for a gang, all or nothing."""

    @property
    def name(self) -> str:
        """The profile's name."""
        ...

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """The chosen nodes, or None when the gang does not fit now. Must not look at more nodes than it needs."""
        ...


@runtime_checkable
class Queueing(Policy, Protocol):
    """A policy with an order of its own for the waiting jobs; who runs stays."""

    def order(self, state: CellState) -> Iterator[str]:
        """Ids of waiting jobs in the order in which they are to be tried, none twice.

        Goes on after each try from the state as it then is: the job given last has been placed, or it waits on.
        """
        ...


class RunSet(msgspec.Struct, frozen=True, gc=False):
    """Who shall run now, by a policy that judges all jobs anew."""

    chosen: tuple[str, ...]
    """Job ids, first claim first. A job that runs and is not among them is stopped."""
    ranks: tuple[JobRank, ...] = ()
    """Changes of the policy's own order; written into the ledger, so that the next plan finds them."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change although nothing happens; None: it does not."""


@runtime_checkable
class Replanning(Policy, Protocol):
    """A policy with an order of its own: it chooses who runs, `place` only where.

    The placer asks once for all inputs of a moment. The same state must give the same answer, and carrying a
    plan out must not change it: stops take time, and the policy is asked again when they are proven.
    """

    def plan(self, state: CellState) -> RunSet:
        """Judged by GPUs only, as if every job that may run were placed anew; what is ending holds its own."""
        ...

    def ranking(self, state: CellState) -> Sequence[str]:
        """Ids of all jobs that may run, first claim first, whether they fit or not; for `why`."""
        ...


def task_id_of(job: JobState, rank: int) -> str:
    """The id of this rank's task in the job's next attempt: `job.attempt.w0`, …, `job.attempt.ps0`, …"""
    workers = job.spec.workers
    role = f"w{rank}" if rank < workers else f"ps{rank - workers}"
    return f"{job.job_id}.{job.attempt + 1}.{role}"


def assign(state: CellState, job: JobState, plan: Plan) -> PlacementDecided:
    """The decision for a plan made on this very state: GPU ids, cores and caps, lowest free first.

    A share goes to the partly given GPU with the least left that holds it (ties: the lowest index), else to the
    lowest wholly free one.
    """
    demand = job.demand
    meet = len(set(plan.nodes)) < len(plan.nodes)  # some on one node: each finds less than the one before
    nodes: dict[str, NodeState] = {}
    tasks: list[TaskPlacement] = []
    for rank, node_id in enumerate(plan.nodes):
        node = nodes.get(node_id) or state.nodes[node_id]
        is_worker = rank < demand.workers
        need = demand.worker if is_worker else demand.parameter_server
        if plan.gpus is not None:
            gpus = plan.gpus[rank]
        elif need.gpu_share_milli == WHOLE_GPU:
            gpus = take_lowest(node.healthy_gpu_mask, need.gpus)
        else:
            gpus = (_share(node, need),)
        place = TaskPlacement(
            task_id=task_id_of(job, rank),
            role="worker" if is_worker else "ps",
            rank=rank,
            node_id=node_id,
            gpus=gpus,
            cores=take_lowest(node.free_core_mask, need.cores),
            host_memory_mib=need.host_memory_mib,
            gpu_memory_mib=need.gpu_memory_mib if need.gpus else 0,
            bandwidth_mbps=need.bandwidth_mbps,
            gpu_share_milli=need.gpu_share_milli,
            host_memory_cap_mib=cap_of(node.spec, need, "worker" if is_worker else "ps", job.estimate),
        )
        tasks.append(place)
        if meet:
            nodes[node_id] = nodes.get(node_id) or node.copy()
            nodes[node_id].give(place)
    return PlacementDecided(job_id=job.job_id, attempt=job.attempt + 1, tasks=tuple(tasks))


def _share(node: NodeState, need: ResourceVector) -> int:
    """The GPU that a share goes to."""
    held = [
        (share, gpu)
        for gpu, share in node.offered.items()
        if share.holds(need) and not node.faulted_gpu_mask >> gpu & 1
    ]
    return min(held)[1] if held else take_lowest(node.healthy_gpu_mask, 1)[0]
