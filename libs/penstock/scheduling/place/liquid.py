"""Liquid's best-fit placement: each task of a gang is placed on the node that gives the plan the smallest
score.

Source: Liquid §5.2, eq. 2 – 6, Alg. 1. The ideal tries every node for every task; this implementation tries
one class of nodes at a time, which gives exactly the same answer (tests compare it with the plain loop in
`tests.papers.liquid.liquid_reference`), so that its cost does not grow with the number of nodes.

    Score(plan)  = λ · Cost(plan) + (1 − λ) · Σ over nodes j of the plan: Fitness(j)          (eq. 4)
    Cost(plan)   = Σ over pairs (parameter server, worker): PairCost(their nodes)            (eq. 5)
    Fitness(j)   = −(GPUs that the plan asks on j + GPUs used on j) / GPUs of j              (eq. 6)

Interpretation, where the paper is not explicit:
- PairCost (eq. 2) has three levels and is measured in nodes that share the bandwidth of the path:
  same node 0; same rack: the nodes of that rack; other rack: the nodes of the domain that holds both racks,
  or of the cell if there is no such domain. Another `Network` is another interpretation
  (`penstock_papers.liquid.Levels`).
- Gone nodes still count among those that share, until they are dropped from the state: shares stay stable.
- A job without parameter servers synchronises by ring all-reduce: its pairs are the neighbours on the ring
  of workers in rank order (two workers: one pair). The paper has no such jobs. One task alone: cost 0.
- Parameter servers are placed before workers: otherwise the placement of workers would have no cost.
- Fitness of a node without GPUs is −1, as of a full one: it has no GPU that could be idle.
- A faulted GPU counts as used. Ties: the lower ordinal, which is the earlier node of Alg. 1's loop.

Departure: line 18 removes the chosen node for all further tasks, which contradicts the text of the same
section (candidates are chosen anew for each task) and the aim of eq. 5 and 6 (keep a job together): here a
node is removed when the next task no longer fits. Option `distinct_nodes=True`: line 18 literally.
"""

from collections.abc import Iterable
from math import lcm

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import EVERYWHERE, Gang, best_of, place_greedily
from penstock.ledger.state.index import NodeIndex, bits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import MAX_GPUS_PER_NODE

FITNESS_UNITS = lcm(*range(1, MAX_GPUS_PER_NODE + 1))
"""Fitness is summed in whole units, so equal plans tie exactly."""


class Network:
    """PairCost (eq. 2) between two nodes, ≥ 0: the number of nodes that share the bandwidth of their path."""

    __slots__ = ("_index",)

    def __init__(self, index: NodeIndex) -> None:
        self._index = index

    def nodes_of(self, rack: str, domain: str) -> int:
        """The nodes of a rack; equal rack names in two domains are two racks."""
        return self._index.rack[rack] & self._index.domain[domain]

    def inside_rack(self, rack: str, domain: str) -> int:
        return self.nodes_of(rack, domain).bit_count()

    def inside_domain(self, domain: str) -> int:
        return self._index.domain[domain].bit_count()

    def across_domains(self) -> int:
        return self._index.known.bit_count()


class Partners:
    """The tasks with which the next task will exchange gradients, counted by node, rack and domain."""

    __slots__ = ("_by_node", "_count", "_network", "domains", "racks")

    def __init__(self, state: CellState, network: Network, ordinals: Iterable[int]) -> None:
        self._network = network
        self._by_node: dict[int, int] = {}
        self.racks: dict[tuple[str, str], int] = {}
        """(rack, domain) → partners."""
        self.domains: dict[str, int] = {}
        self._count = 0
        for ordinal in ordinals:
            spec = state.node(ordinal).spec
            place = spec.rack, spec.domain
            self._by_node[ordinal] = self._by_node.get(ordinal, 0) + 1
            self.racks[place] = self.racks.get(place, 0) + 1
            self.domains[spec.domain] = self.domains.get(spec.domain, 0) + 1
            self._count += 1

    def cost_at(self, rack: str, domain: str, ordinal: int = -1) -> int:
        """Eq. 2 summed over the partners, for a task on this node, or on any other node of the rack."""
        in_rack = self.racks.get((rack, domain), 0)
        total = self.cost_in(domain, in_rack)
        others = in_rack - self._by_node.get(ordinal, 0)
        return total + others * self._network.inside_rack(rack, domain) if others else total

    def cost_in(self, domain: str, in_rack: int = 0) -> int:
        """The same for a task in a rack of the domain that holds `in_rack` partners."""
        in_domain = self.domains.get(domain, 0)
        others, beyond = in_domain - in_rack, self._count - in_domain
        total = others * self._network.inside_domain(domain) if others else 0
        return total + beyond * self._network.across_domains() if beyond else total

    def cost_beyond(self) -> int:
        """The same for a task in a domain without partners."""
        return self._count * self._network.across_domains()


_Class = tuple[float, int, int, int]
"""(score of the plan, nodes, cost of the plan, fitness of the plan)."""


def fitness_units(taken: int, total: int) -> int:
    """Eq. 6 in 1/720,720: −(GPUs asked + used) / GPUs of the node; −1 for a node without GPUs."""
    return -taken * (FITNESS_UNITS // total) if total else -FITNESS_UNITS


class _Search:
    """Alg. 1 for one gang: the plan so far, its cost and its fitness."""

    __slots__ = ("_best", "_cost", "_fitness", "_network", "_policy", "_servers")

    def __init__(self, policy: "Liquid", network: Network) -> None:
        self._policy = policy
        self._network = network
        self._cost = 0
        self._fitness = 0
        self._best = (0, 0)
        self._servers: Partners | None = None

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        """Lines 3 – 16: the best open nodes for the next task, as (score of the plan with it, ordinal)."""
        self._cost, self._fitness = self._best
        partners = self._partners(gang, is_worker)
        classes = self._classes(gang, is_worker, partners)
        ranked = best_of([(score, nodes) for score, nodes, _, _ in classes], limit)
        if ranked:
            best, bit = ranked[0][0], 1 << ranked[0][1]
            self._best = next(
                (cost, fitness) for score, nodes, cost, fitness in classes if score == best and nodes & bit
            )
        return ranked

    def _partners(self, gang: Gang, is_worker: bool) -> Partners | None:
        """The placed tasks with which the next task will communicate; opens the ring at the point of
        insertion."""
        if gang.demand.parameter_servers:
            if not is_worker:
                return None  # no worker is placed yet
            if self._servers is None:
                self._servers = Partners(gang.state, self._network, gang.servers)
            return self._servers
        workers = gang.workers
        if not workers:
            return None
        if len(workers) == 1:
            return Partners(gang.state, self._network, workers)
        first, last = workers[0], workers[-1]
        if len(workers) > 2:
            spec = gang.state.node(last).spec
            closing = Partners(gang.state, self._network, (first,))
            self._cost -= closing.cost_at(spec.rack, spec.domain, last)
        return Partners(gang.state, self._network, (last, first))

    def _classes(self, gang: Gang, is_worker: bool, partners: Partners | None) -> list[_Class]:
        """Classes of open nodes: every node is in exactly one class; all nodes of a class give plans of equal
        cost and fitness."""
        need = gang.need(is_worker).gpus
        open_nodes = gang.open(is_worker)
        classes = self._used_nodes(gang, need, open_nodes & gang.used, partners)
        open_nodes &= ~gang.used
        if partners is None:
            groups = [(open_nodes, 0)]
        else:
            groups = self._distances(gang, open_nodes, partners)
        for nodes, cost in groups:
            for (used, total), loaded in gang.state.index.load.items():
                here = nodes & loaded
                if here:
                    fitness = self._fitness + fitness_units(used + need, total)
                    classes.append(self._class(here, self._cost + cost, fitness))
        return classes

    def _used_nodes(self, gang: Gang, need: int, open_nodes: int, partners: Partners | None) -> list[_Class]:
        """Nodes that the plan already uses, one class each, since their load depends on the plan."""
        classes: list[_Class] = []
        for ordinal in bits(open_nodes):
            spec = gang.state.node(ordinal).spec
            cost = partners.cost_at(spec.rack, spec.domain, ordinal) if partners else 0
            more = fitness_units(need, len(spec.gpus)) if spec.gpus else 0
            classes.append(self._class(1 << ordinal, self._cost + cost, self._fitness + more))
        return classes

    def _distances(self, gang: Gang, open_nodes: int, partners: Partners) -> list[tuple[int, int]]:
        """The nodes that the plan does not use yet, by their cost to the partners."""
        groups: list[tuple[int, int]] = []
        for rack, domain in partners.racks:
            here = open_nodes & self._network.nodes_of(rack, domain)
            if here:
                groups.append((here, partners.cost_at(rack, domain)))
                open_nodes &= ~here
        for domain in partners.domains:
            here = open_nodes & gang.state.index.domain[domain]
            if here:
                groups.append((here, partners.cost_in(domain)))
                open_nodes &= ~here
        if open_nodes:
            groups.append((open_nodes, partners.cost_beyond()))
        return groups

    def _class(self, nodes: int, cost: int, fitness: int) -> _Class:
        return self._policy.score(cost, fitness), nodes, cost, fitness


class Liquid:
    """Alg. 1. `network_weight` is λ ∈ [0, 1] of eq. 4; `network`: interpretation of eq. 2."""

    def __init__(
        self,
        network_weight: float,
        network: type[Network] = Network,
        *,
        distinct_nodes: bool = False,
        name: str = "liquid",
    ) -> None:
        assert 0 <= network_weight <= 1, network_weight
        self.name = name
        self._weight = network_weight
        self._network = network
        self._distinct_nodes = distinct_nodes

    def score(self, cost: int, fitness: int) -> float:
        """Eq. 4; `fitness` in 1/720,720."""
        return self._weight * cost + (1 - self._weight) * (fitness / FITNESS_UNITS)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """See the module's docstring; no random choice."""
        return self.place_within(EVERYWHERE, state, job)

    def place_within(
        self, nodes: int, state: CellState, job: JobState, *, servers: int = EVERYWHERE
    ) -> Plan | None:
        """Places the job only on these nodes, parameter servers on those of `servers`. Both are sets."""
        search = _Search(self, self._network(state.index))
        return place_greedily(
            self.name,
            state,
            job,
            search.rank,
            distinct_nodes=self._distinct_nodes,
            within=nodes,
            servers_within=servers,
        )
