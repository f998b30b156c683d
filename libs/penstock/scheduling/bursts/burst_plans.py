"""Plans of a burst (a node for every task of every gang) with incremental evaluation: for
`penstock.scheduling.bursts.gga` and `penstock.scheduling.bursts.exchanges`.

A plan's fitness is eq. 8 of Liquid §5.3, see `penstock.scheduling.bursts.gga`. A change updates only the
terms of the nodes and jobs that it affects, so its cost does not grow with the plan.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.scheduling.place.liquid import FITNESS_UNITS, fitness_units

UNPLACED = 1e6  # penalty for a job that is left out
UNFAIR = 1e9  # penalty if the given plan places it

Need = tuple[int, int, int, int]
"""GPUs, cores, host memory in MiB, bandwidth in Mbit/s."""
Place = tuple[int, ...]
"""Number of the node of each task in rank order: workers, then parameter servers."""


class Machine(NamedTuple):
    """A node. `rack` is unique over domains."""

    rack: int
    domain: int
    total_gpus: int
    used_gpus: int
    free: Need


class Gang(NamedTuple):
    """A job of the burst."""

    workers: int
    worker: Need
    servers: int
    server: Need
    worker_nodes: int
    """Set of the nodes that suit a worker by GPU model and memory."""
    server_nodes: int


class Costs(NamedTuple):
    """Eq. 2 between two nodes: of one rack, of one domain, of different domains."""

    rack: tuple[int, ...]
    """Cost inside each rack."""
    domain: tuple[int, ...]
    """Cost between racks of each domain."""
    beyond: int


class Problem(NamedTuple):
    """A burst to be placed and the nodes for it. `given`: each job's place by the immediate path; empty where
    it does not start."""

    machines: Sequence[Machine]
    gangs: Sequence[Gang]
    costs: Costs
    network_weight: float
    given: Sequence[Place]


class Plan:
    """A chromosome. Copies share unchanged parts: the values of all lists are immutable."""

    __slots__ = ("at", "cost", "free", "left_out", "loads", "nodes", "on", "total_cost")

    def __init__(self, problem: "Instance") -> None:
        self.at = [-1] * len(problem.job_of)
        """Container → node; -1: its job is left out."""
        self.free = list(problem.free)
        self.on: list[tuple[int, ...]] = [()] * len(problem.free)
        """Node → containers."""
        self.cost = [0] * len(problem.first)
        """Job → eq. 5."""
        self.total_cost = 0
        self.loads = [0] * len(problem.free)
        """Node → eq. 6 over the jobs on it, in 1/720,720."""
        self.nodes = 0
        self.left_out: set[int] = set(range(len(problem.first)))

    def copy(self) -> "Plan":
        other = object.__new__(Plan)
        other.at, other.free, other.on, other.cost = self.at[:], self.free[:], self.on[:], self.cost[:]
        other.total_cost, other.loads, other.nodes = self.total_cost, self.loads[:], self.nodes
        other.left_out = set(self.left_out)
        return other


class Instance:
    """A problem as tables."""

    def __init__(self, problem: Problem) -> None:
        self.machines, self.costs = problem.machines, problem.costs
        self.weight = problem.network_weight
        self.free = [machine.free for machine in problem.machines]
        self.rack = [machine.rack for machine in problem.machines]
        self.given = problem.given
        kinds: dict[Gang, int] = {}
        self.kind = [kinds.setdefault(gang, len(kinds)) for gang in problem.gangs]
        """Job → number of its kind: gangs of one kind are equal."""
        self.gpus = [gang.workers * gang.worker[0] + gang.servers * gang.server[0] for gang in problem.gangs]
        self.first: list[range] = []
        """Job → its containers, in rank order."""
        self.job_of: list[int] = []
        self.need: list[Need] = []
        self.suits: list[int] = []
        self.partners: list[tuple[int, ...]] = []
        for number, gang in enumerate(problem.gangs):
            begin, tasks = len(self.job_of), gang.workers + gang.servers
            self.first.append(range(begin, begin + tasks))
            self.job_of += [number] * tasks
            self.need += [gang.worker] * gang.workers + [gang.server] * gang.servers
            self.suits += [gang.worker_nodes] * gang.workers + [gang.server_nodes] * gang.servers
            self.partners += _partners(gang, begin)
        self.placed_by_given = [bool(place) for place in problem.given]
        order = sorted(range(len(problem.given)), key=lambda job: not self.placed_by_given[job])
        self.turn = {job: turn for turn, job in enumerate(order)}
        """Job → when it is tried again: first those that the given plan places."""

    def pair(self, a: int, b: int) -> int:
        """Eq. 2."""
        if a == b:
            return 0
        one, other = self.machines[a], self.machines[b]
        if one.rack == other.rack:
            return self.costs.rack[one.rack]
        return self.costs.domain[one.domain] if one.domain == other.domain else self.costs.beyond

    def cost_of(self, job: int, at: Sequence[int]) -> int:
        """Eq. 5; each pair is in the lists of both."""
        pair, partners = self.pair, self.partners
        return sum([pair(at[one], at[other]) for one in self.first[job] for other in partners[one]]) // 2

    def load_of(self, node: int, containers: Iterable[int]) -> int:
        """Eq. 6 of the node, summed over the jobs on it."""
        jobs = {self.job_of[one] for one in containers}
        if not jobs:
            return 0
        machine = self.machines[node]
        asked = sum([self.need[one][0] for one in containers])
        return len(jobs) * fitness_units(machine.used_gpus + asked, machine.total_gpus)

    def fitness(self, plan: Plan) -> float:
        """Eq. 8."""
        score = self.weight * plan.total_cost + (1 - self.weight) * (sum(plan.loads) / FITNESS_UNITS)
        return -score - plan.nodes

    def rank(self, plan: Plan) -> float:
        """Eq. 8, with penalties for jobs that are left out."""
        held_back = sum([self.placed_by_given[job] for job in plan.left_out])
        return self.fitness(plan) - UNPLACED * len(plan.left_out) - UNFAIR * held_back


def _partners(gang: Gang, begin: int) -> list[tuple[int, ...]]:
    """For each task the tasks with which it exchanges gradients: workers with servers, or neighbours on the
    ring of workers."""
    workers = range(begin, begin + gang.workers)
    if gang.servers:
        servers = range(begin + gang.workers, begin + gang.workers + gang.servers)
        return [tuple(servers)] * gang.workers + [tuple(workers)] * gang.servers
    count = gang.workers
    if count == 1:
        return [()]
    if count == 2:
        return [(begin + 1,), (begin,)]
    return [(begin + (i - 1) % count, begin + (i + 1) % count) for i in range(count)]


class Change:
    """A plan being changed: the terms of the affected nodes and jobs are updated at the end."""

    def __init__(self, problem: Instance, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self._nodes: dict[int, tuple[int, ...]] = {}
        """Affected node → containers before."""
        self._jobs: set[int] = set()

    def clear(self, node: int) -> tuple[int, ...]:
        """Takes all containers off the node."""
        plan = self.plan
        gone = plan.on[node]
        self._nodes.setdefault(node, gone)
        plan.on[node], plan.free[node] = (), self.problem.free[node]
        for one in gone:
            plan.at[one] = -1
            self._jobs.add(self.problem.job_of[one])
        return gone

    def _first(self, one: int, nodes: Iterable[int]) -> int:
        """The first of the nodes on which the container fits; -1: there is none."""
        free, suits = self.plan.free, self.problem.suits[one]
        gpus, cores, memory_mib, mbps = self.problem.need[one]
        for node in nodes:
            left = free[node]
            if (
                left[0] >= gpus
                and left[1] >= cores
                and left[2] >= memory_mib
                and left[3] >= mbps
                and suits >> node & 1
            ):
                return node
        return -1

    def put(self, node: int, one: int) -> None:
        plan, free, need = self.plan, self.plan.free[node], self.problem.need[one]
        self._nodes.setdefault(node, plan.on[node])
        plan.free[node] = (free[0] - need[0], free[1] - need[1], free[2] - need[2], free[3] - need[3])
        plan.on[node] += (one,)
        plan.at[one] = node
        self._jobs.add(self.problem.job_of[one])

    def take(self, one: int) -> None:
        """Takes the container off its node."""
        plan, need = self.plan, self.problem.need[one]
        node = plan.at[one]
        self._nodes.setdefault(node, plan.on[node])
        free = plan.free[node]
        plan.free[node] = (free[0] + need[0], free[1] + need[1], free[2] + need[2], free[3] + need[3])
        plan.on[node] = tuple(other for other in plan.on[node] if other != one)
        plan.at[one] = -1
        self._jobs.add(self.problem.job_of[one])

    def drop(self, job: int) -> None:
        """Leaves out the whole job."""
        for one in self.problem.first[job]:
            if self.plan.at[one] >= 0:
                self.take(one)
        self._jobs.add(job)
        self.plan.left_out.add(job)

    def place(self, one: int, nodes: Sequence[int], *, near: bool) -> bool:
        """Puts the container on the first of the nodes on which it fits; with `near` its partners' nodes and
        then their racks come first."""
        found = -1
        if near:
            at, rack = self.plan.at, self.problem.rack
            hosts = [at[other] for other in self.problem.partners[one] if at[other] >= 0]
            if hosts:
                found = self._first(one, sorted(set(hosts), key=lambda host: (-hosts.count(host), host)))
                if found < 0:
                    racks = {rack[host] for host in hosts}
                    found = self._first(one, (node for node in nodes if rack[node] in racks))
        if found < 0:
            found = self._first(one, nodes)
        if found < 0:
            return False
        self.put(found, one)
        return True

    def place_job(self, job: int, nodes: Sequence[int], *, near: bool) -> bool:
        """Places the whole gang, which is left out, or no task of it."""
        if self.problem.gpus[job] > sum([free[0] for free in self.plan.free]):
            return False
        self.plan.left_out.discard(job)
        containers = self.problem.first[job]
        if all(self.place(one, nodes, near=near) for one in containers):
            return True
        self.drop(job)
        return False

    def done(self) -> Plan:
        plan, problem = self.plan, self.problem
        for job in self._jobs:
            now = 0 if job in plan.left_out else problem.cost_of(job, plan.at)
            plan.total_cost += now - plan.cost[job]
            plan.cost[job] = now
        for node, before in self._nodes.items():
            now_on = plan.on[node]
            plan.loads[node] = problem.load_of(node, now_on)
            plan.nodes += bool(now_on) - bool(before)
        return plan
