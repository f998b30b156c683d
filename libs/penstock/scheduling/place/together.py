"""Locality-aware gang placement: on one node if one holds the whole gang, else in one rack, else by Liquid's
score.

Liquid (`penstock.scheduling.place.liquid`) decides task by task, and its fitness prefers full nodes: it
splits a gang of four over two nearly full nodes though a whole node is free. Here whole plans are compared
first. Departure from Liquid §5.2: the steps before its Alg. 1.

- One node: of the nodes that hold all tasks the one that is fullest afterwards (eq. 6 for the whole gang; the
  cost is 0). Ties: the lower ordinal.
- One rack: of the racks with enough free GPUs those with the fewest, at most MAX_RACKS; the first in which
  Alg. 1 finds a place.
- Parameter servers of a gang that no node holds: on the node that holds them with the most workers; of
  several the one that is fullest afterwards. Alg. 1 places servers first and where least is free, so that all
  workers are elsewhere, and servers without GPUs of all jobs are on one full node, whose link they share.
- Else Alg. 1 over all nodes. For a single task, and for a gang that takes parts of GPUs, it is the only step.
- Jobs without GPUs, one task after the other: on the node with the most cores beyond those that its free GPUs
  will need (`spare_cores`). Alg. 1 packs them, which leaves free GPUs without free cores.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import EVERYWHERE, Gang, best_of, by_free_cores, explanation, place_greedily
from penstock.ledger.state.index import bits, lowest
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_CANDIDATES
from penstock.model.nouns.types import MAX_GPUS_PER_NODE, WHOLE_GPU, ResourceVector
from penstock.scheduling.place.liquid import Liquid, fitness_units

MAX_RACKS = 8  # each costs a run of Alg. 1


class Together:
    """Implements `penstock.scheduling.stages.protocols.Policy`."""

    def __init__(self, name: str, network_weight: float) -> None:
        self.name = name
        self._liquid = Liquid(network_weight, name=name)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """See the module's docstring; no random choice."""
        return self.place_within(EVERYWHERE, state, job)

    def place_within(self, nodes: int, state: CellState, job: JobState) -> Plan | None:
        """Places the job only on these nodes. `nodes`: a set."""
        demand = job.demand
        if not demand.worker.gpus and not (demand.parameter_servers and demand.parameter_server.gpus):
            return place_greedily(self.name, state, job, spare_cores, within=nodes)
        if demand.tasks > 1 and demand.worker.gpu_share_milli == WHOLE_GPU:
            plan = self._on_one_node(nodes, state, job, demand)
            if plan is not None:
                return plan
            for rack in racks(state, demand, nodes):
                plan = self._apart(rack, state, job, demand)
                if plan is not None:
                    return plan
            return self._apart(nodes, state, job, demand)
        return self._liquid.place_within(nodes, state, job)

    def _apart(self, nodes: int, state: CellState, job: JobState, demand: Demand) -> Plan | None:
        """Places the gang on several of these nodes."""
        home = _home_of_servers(state, demand, nodes) if demand.parameter_servers else 0
        plan = self._liquid.place_within(nodes, state, job, servers=home) if home else None
        return plan or self._liquid.place_within(nodes, state, job)

    def _on_one_node(self, nodes: int, state: CellState, job: JobState, demand: Demand) -> Plan | None:
        whole = whole_gang(demand)
        if whole is None:
            return None
        index = state.index
        fitting = index.candidates(whole, demand.where) & nodes
        ranked = best_of(
            (
                (self._liquid.score(0, fitness_units(used + whole.gpus, total)), fitting & there)
                for (used, total), there in index.load.items()
                if fitting & there
            ),
            MAX_CANDIDATES,
        )
        if not ranked:
            return None
        plans = [(state.node_at[ordinal],) * demand.tasks for _, ordinal in ranked]
        return Plan(
            plans[0], explanation(self.name, job.job_id, Gang(state, demand, within=nodes), ranked, plans)
        )


def spare_cores(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
    """Implements `penstock.cluster.gang.Rank`. Score: cores that the free GPUs will need, each as many as the
    node has per GPU, minus free cores. Ties: the lower ordinal.

    Source: CODA §V-C reserves cores for GPUs; differs: nothing is reserved, such nodes only come last.
    """
    nodes, index = gang.open(is_worker), gang.state.index
    own = nodes & gang.used
    found = []
    for ordinal in bits(own):
        spec, free = gang.state.node(ordinal).spec, gang.free(ordinal)
        found.append((_wanted(free.gpus, spec.cores, len(spec.gpus)) - free.cores, 1 << ordinal))
    for (used, total), loaded in index.load.items():
        if not (there := nodes & loaded & ~own):
            continue
        for shape, alike in index.shape.items():
            if here := there & alike:
                wanted = _wanted(total - used, shape.cores, total)
                found += [(wanted + score, equal) for score, equal in by_free_cores(gang, here, limit)]
    return best_of(found, limit)


def _wanted(free_gpus: int, cores: int, gpus: int) -> float:
    """Cores in proportion to so many of a node's GPUs."""
    return free_gpus * cores / max(1, gpus)


def _home_of_servers(state: CellState, demand: Demand, nodes: int) -> int:
    """The node for all parameter servers and the most workers that fit beside them, as a set; empty: no node
    holds them with at least one worker."""
    index = state.index
    servers = (demand.parameter_server,) * demand.parameter_servers
    fewest = sum(server.gpus for server in servers)
    most = (MAX_GPUS_PER_NODE - fewest) // max(1, demand.worker.gpus)
    for workers in range(min(demand.workers, most), 0, -1):
        need = _together((demand.worker,) * workers + servers)
        fitting = 0 if need is None else index.candidates(need, demand.where) & nodes
        if fitting:
            free = min(total - used for (used, total), there in index.load.items() if there & fitting)
            fullest = sum(
                there & fitting for (used, total), there in index.load.items() if total - used == free
            )
            return 1 << lowest(fullest)
    return 0


@lru_cache(maxsize=1_024)
def whole_gang(demand: Demand) -> ResourceVector | None:
    """Resources that a node needs to hold all tasks; None where no node can have so many GPUs."""
    return _together(demand.needs())


def _together(needs: Sequence[ResourceVector]) -> ResourceVector | None:
    gpus = sum(need.gpus for need in needs)
    if gpus > MAX_GPUS_PER_NODE:
        return None
    return ResourceVector(
        gpus=gpus,
        cores=sum(need.cores for need in needs),
        host_memory_mib=sum(need.host_memory_mib for need in needs),
        gpu_memory_mib=max(need.gpu_memory_mib for need in needs),
        bandwidth_mbps=sum(need.bandwidth_mbps for need in needs),
    )


def racks(state: CellState, demand: Demand, nodes: int) -> Iterator[int]:
    """Sets of the nodes of racks that have enough free GPUs for the gang, those with the fewest first; at
    most MAX_RACKS."""
    index = state.index
    fitting = index.candidates(demand.worker, demand.where) & nodes
    wanted = demand.workers * demand.worker.gpus
    found = []
    for rack, in_rack in index.rack.items():
        for domain, in_domain in index.domain.items():
            here = in_rack & in_domain & nodes
            if not here & fitting:
                continue
            free = sum(
                (total - used) * (there & here & fitting).bit_count()
                for (used, total), there in index.load.items()
            )
            if free >= wanted:
                found.append((free, rack, domain, here))
    found.sort()
    for _, _, _, here in found[:MAX_RACKS]:
        yield here
