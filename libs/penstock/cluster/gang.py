"""Greedy gang placement, task by task on a view of the cell: resources that the plan takes are counted, and
the state is not changed.

All policies here are greedy: they place one task after the other, never take one back, and place all tasks or
none. They differ only in how they rank the nodes that are open to the next task (`Rank`).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import refusals
from penstock.cluster.view import ClusterView
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_CANDIDATES, Candidate, PlacementExplanation
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector

EVERYWHERE = -1  # the set of all nodes


class Gang:
    """A partial plan. Nodes are given by ordinals; sets are bit sets over ordinals."""

    __slots__ = (
        "_open_servers",
        "_open_workers",
        "demand",
        "distinct_nodes",
        "fitting",
        "free",
        "servers",
        "state",
        "used",
        "view",
        "workers",
    )

    def __init__(
        self,
        state: CellState,
        demand: Demand,
        *,
        distinct_nodes: bool = False,
        within: int = EVERYWHERE,
        servers_within: int = EVERYWHERE,
    ) -> None:
        self.state = state
        self.demand = demand
        self.distinct_nodes = distinct_nodes
        index = state.index
        self.fitting = index.candidates(demand.worker, demand.where)
        self._open_workers = self.fitting & within
        """`fitting`: nodes on which one worker fits before this plan takes anything."""
        self._open_servers = (
            index.candidates(demand.parameter_server, demand.where) & within & servers_within
            if demand.parameter_servers
            else 0
        )
        self.view = ClusterView(state)
        """The nodes, less this plan's own tasks."""
        self.free = self.view.free
        self.used = 0
        self.workers: list[int] = []
        self.servers: list[int] = []

    def open(self, is_worker: bool) -> int:
        """The nodes that can take one more task of this role."""
        return self._open_workers if is_worker else self._open_servers

    def need(self, is_worker: bool) -> ResourceVector:
        return self.demand.worker if is_worker else self.demand.parameter_server

    def take(self, ordinal: int, is_worker: bool) -> None:
        """Puts the next task of this role on an open node."""
        self.view.claim_task(self.need(is_worker), ordinal)
        left = self.free(ordinal)
        (self.workers if is_worker else self.servers).append(ordinal)
        bit = 1 << ordinal
        self.used |= bit
        if self.distinct_nodes or not left.fits(self.demand.worker):
            self._open_workers &= ~bit
        if self.demand.parameter_servers and (
            self.distinct_nodes or not left.fits(self.demand.parameter_server)
        ):
            self._open_servers &= ~bit

    def may_hold_all_workers(self) -> bool:
        """False if the number of free GPUs alone excludes the gang. Costs at most one count per GPU of a
        node."""
        need, wanted = self.demand.worker.gpus, self.demand.workers
        shares = self.demand.worker.gpu_share_milli < WHOLE_GPU
        if wanted == 1 or need == 0 or shares or self.distinct_nodes:
            return self._open_workers.bit_count() >= (wanted if self.distinct_nodes else 1)
        return workers_by_gpus(self.state, need, wanted, self._open_workers) == wanted


def workers_by_gpus(state: CellState, each: int, wanted: int, nodes: int) -> int:
    """For how many workers of `each` GPUs, at most `wanted`, the free GPUs of these nodes suffice. At most
    one count per GPU of a node."""
    found, level = 0, each
    while found < wanted:
        more = (nodes & state.index.gpus.having(level)).bit_count()
        if not more:
            return found
        found += more
        level += each
    return wanted


Rank = Callable[[Gang, bool, int], list[tuple[float, int]]]
"""(gang, is_worker, limit) → at most `limit` open nodes, best first, as (score of the plan with it,
ordinal)."""


def best_of(classes: Iterable[tuple[float, int]], limit: int) -> list[tuple[float, int]]:
    """At most `limit` (score, ordinal), by score and then ordinal, from (score, nodes) in any order."""
    chosen: list[tuple[float, int]] = []
    for score, nodes in sorted(classes):
        if len(chosen) >= limit and score > chosen[-1][0]:
            break
        chosen += [(score, ordinal) for ordinal in islice(bits(nodes), limit)]
    chosen.sort()
    return chosen[:limit]


def place_greedily(
    profile: str,
    state: CellState,
    job: JobState,
    rank: Rank,
    *,
    distinct_nodes: bool = False,
    within: int = EVERYWHERE,
    servers_within: int = EVERYWHERE,
) -> Plan | None:
    """Places parameter servers first, then workers, each on the best-ranked open node; None if a task finds
    none.

    The explanation's alternatives are complete plans that differ from the chosen one in the task placed last:
    for a job of one task the five best nodes. They need no extra computation, and the margin is ≥ 0 by
    construction.

    `within`: set of the nodes that may be used; `servers_within`: set of those for parameter servers.
    """
    demand = job.demand
    gang = Gang(state, demand, distinct_nodes=distinct_nodes, within=within, servers_within=servers_within)
    if not gang.may_hold_all_workers():
        return None
    for is_worker in (*repeat(False, demand.parameter_servers), *repeat(True, demand.workers - 1)):
        ranked = rank(gang, is_worker, 1)
        if not ranked:
            return None
        gang.take(ranked[0][1], is_worker)
    ranked = rank(gang, True, MAX_CANDIDATES)
    if not ranked:
        return None
    plans = _varied(gang, [ordinal for _, ordinal in ranked])
    return Plan(plans[0], explanation(profile, job.job_id, gang, ranked, plans))


class Greedy:
    """A policy that places each task on the node that it ranks first; no random choice."""

    def __init__(self, name: str) -> None:
        self.name = name

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        return place_greedily(self.name, state, job, self.rank)

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        """As `Rank`."""
        raise NotImplementedError


def _varied(gang: Gang, last_workers: list[int]) -> list[tuple[str, ...]]:
    """For each choice for the task placed last: the node ids of the whole gang, in rank order."""
    node_at = gang.state.node_at
    before = tuple(node_at[ordinal] for ordinal in gang.workers)
    after = tuple(node_at[ordinal] for ordinal in gang.servers)
    return [(*before, node_at[ordinal], *after) for ordinal in last_workers]


def explanation(
    profile: str, job_id: str, gang: Gang, ranked: list[tuple[float, int]], plans: list[tuple[str, ...]]
) -> PlacementExplanation:
    demand = gang.demand
    refused = refusals(gang.state.index, demand.worker, demand.where, gang.fitting)
    return PlacementExplanation(
        job_id=job_id,
        profile=profile,
        candidates=tuple(
            Candidate(nodes=nodes, score=float(score))
            for nodes, (score, _) in zip(plans, ranked, strict=True)
        ),
        margin=float(ranked[1][0] - ranked[0][0]) if len(ranked) > 1 else None,
        feasible=gang.fitting.bit_count(),
        rejected={reason.value: nodes.bit_count() for reason, nodes in refused.items()},
    )


def by_free_cores(gang: Gang, nodes: int, limit: int) -> Iterator[tuple[float, int]]:
    """(minus the free cores, nodes), most free first, until `limit` nodes are found."""
    at_least = gang.state.index.cores.at_least
    found = more = 0
    for level in range(len(at_least) - 1, -1, -1):
        here = nodes & at_least[level] & ~more
        more |= here
        if here:
            yield float(-level), here
            found += here.bit_count()
            if found >= limit:
                return
