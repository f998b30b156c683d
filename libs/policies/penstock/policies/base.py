"""The protocol of placement policies, and what turns their answer into a decision.

A policy only chooses nodes; GPUs and cores inside a node are chosen here (lowest free first), so that all
policies leave the node equally little choice. A policy reads the state and writes nothing.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from penstock.cluster.nouns import TaskPlacement
from penstock.events.facts import JobRank, PlacementDecided, PlacementExplanation
from penstock.ledger.state import CellState, JobState, take_lowest

RANDOM_SEED_BYTES = 8


class Plan(NamedTuple):
    """Where a whole gang goes."""

    nodes: tuple[str, ...]
    """Node id per task in rank order: workers 0 … w−1, then parameter servers."""
    explanation: PlacementExplanation


class Chance:
    """Seeded chance: a generator per input event, from (run seed, event id); equal in every replay."""

    def __init__(self, seed: int, event_id: str) -> None:
        self._entropy = (seed, *event_id.encode())
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        """Made at first use: most policies never draw."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._entropy)))
        return self._generator


class Policy(Protocol):
    """Chooses nodes for a gang, all or nothing."""

    @property
    def name(self) -> str:
        """The profile's name."""
        ...

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """The chosen nodes, or None when the gang does not fit now. Must not look at more nodes than it needs."""
        ...


@runtime_checkable
class Preemptive(Policy, Protocol):
    """A policy that may stop running jobs for the one at the head of the queue."""

    def victims(self, state: CellState, job: JobState) -> tuple[str, ...]:
        """Ids of LAUNCHING or RUNNING jobs to stop so that `job` fits once they have ended; () to let it wait.

        Called again on every occasion until `job` is placed: what is STOPPING already counts as room to come.
        A victim queues again at its old place, so it must come after `job` in the queue's order.
        """
        ...


class RunSet(NamedTuple):
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


def task_id_of(job: JobState, rank: int) -> str:
    """The id of this rank's task in the job's next attempt: `job.attempt.w0`, …, `job.attempt.ps0`, …"""
    workers = job.spec.workers
    role = f"w{rank}" if rank < workers else f"ps{rank - workers}"
    return f"{job.job_id}.{job.attempt + 1}.{role}"


def assign(state: CellState, job: JobState, plan: Plan) -> PlacementDecided:
    """The decision for a plan made on this very state: GPU ids, cores and caps, lowest free first."""
    demand = job.demand
    attempt = job.attempt + 1
    taken: dict[str, tuple[int, int]] = {}
    tasks: list[TaskPlacement] = []
    for rank, node_id in enumerate(plan.nodes):
        node = state.nodes[node_id]
        is_worker = rank < demand.workers
        need = demand.worker if is_worker else demand.parameter_server
        free_gpus, free_cores = taken.get(
            node_id, (node.free_gpu_mask & ~node.faulted_gpu_mask, node.free_core_mask)
        )
        gpus, cores = take_lowest(free_gpus, need.gpus), take_lowest(free_cores, need.cores)
        for gpu in gpus:
            free_gpus &= ~(1 << gpu)
        for core in cores:
            free_cores &= ~(1 << core)
        taken[node_id] = (free_gpus, free_cores)
        tasks.append(
            TaskPlacement(
                task_id=task_id_of(job, rank),
                role="worker" if is_worker else "ps",
                rank=rank,
                node_id=node_id,
                gpus=gpus,
                cores=cores,
                host_memory_mib=need.host_memory_mib,
                gpu_memory_mib=need.gpu_memory_mib if need.gpus else 0,
                bandwidth_mbps=need.bandwidth_mbps,
            )
        )
    return PlacementDecided(job_id=job.job_id, attempt=attempt, tasks=tuple(tasks))
