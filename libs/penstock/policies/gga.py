"""Grouping genetic algorithm: places a burst of gangs at once; groups are nodes, and operators work on whole nodes.

Source: Liquid §5.3, eq. 7 and 8, Figs 8 and 9; grouping encoding after Falkenauer, J. Heuristics 2(1), '96.

    GeneticFitness(plan) = −Σ over jobs: Score(job's plan) − NumNU            (eq. 8; NumNU: nodes that the burst uses)

- Population: the given plan (sequential best fit), first fit and random fit, over job orders and node orders drawn anew.
- Selection: tournaments; the loser of another one makes way for the child, so ordinary plans stay, and the best one always.
- Crossover (Fig. 8): a node of plan X with its containers goes into plan Y; other nodes of Y that hold one of these are cleared, and what
  was on them is placed again. Mutation (Fig. 9): a random node is cleared, its containers go on the others.

Readings and departures:
- Used GPUs of eq. 6 count the whole burst, so a plan's fitness does not depend on the order of its jobs.
- The paper calls a plan with an unplaced container invalid. A burst may need more than there is, so a job may be left out as a whole, at UNPLACED;
  leaving out one that the given plan places costs UNFAIR: who would start at once is never held back for others.
- Containers are placed again by first fit, on the plan's nodes and then on unused ones. In every other child those beside which their
  partners are come first (`near`; the paper has first fit alone: `near=False`).
- A child costs what its changed nodes cost. Children are bounded by CHILD_CONTAINERS / containers, so that the time stays flat as jobs and nodes grow.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.policies.liquid import FITNESS_UNITS, fitness_units

POPULATION = 16
TOURNAMENT = 3
CROSSOVER_SHARE = 0.6
MAX_CHILDREN = 2_000
CHILD_CONTAINERS = 300_000  # children × containers of one run
MIN_CHILDREN = 100
STALE_CHILDREN = 800  # without a better best plan: it ends
MAX_TRIED_AGAIN = 16  # jobs that are left out are tried again in each child
UNPLACED = 1e6  # of a job
UNFAIR = 1e9
DRAWS = 4_096

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
    """Set of the nodes whose kind suits a worker."""
    server_nodes: int


class Costs(NamedTuple):
    """Eq. 2 between two nodes: of one rack, of one domain, beyond."""

    rack: tuple[int, ...]
    """By rack."""
    domain: tuple[int, ...]
    """By domain."""
    beyond: int


class Problem(NamedTuple):
    """What the burst is placed on. `given`: where each job goes by the immediate path; empty where it does not start."""

    machines: Sequence[Machine]
    gangs: Sequence[Gang]
    costs: Costs
    network_weight: float
    given: Sequence[Place]


class Found(NamedTuple):
    """The best plan; empty places wait. `fitness` and `given_fitness`: eq. 8 without what is left out."""

    places: tuple[Place, ...]
    fitness: float
    given_fitness: float
    nodes: int
    children: int


class _Plan:
    """A chromosome. Copies share what has not changed: the values of all lists are immutable."""

    __slots__ = ("at", "cost", "free", "left_out", "load", "nodes", "on", "total_cost")

    def __init__(self, problem: "_Problem") -> None:
        self.at = [-1] * len(problem.job_of)
        """Container → node; -1: its job is left out."""
        self.free = list(problem.free)
        self.on: list[tuple[int, ...]] = [()] * len(problem.free)
        """Node → containers."""
        self.cost = [0] * len(problem.first)
        """Job → eq. 5."""
        self.total_cost = 0
        self.load = 0
        """Eq. 6 over all jobs and nodes, in 1/720,720."""
        self.nodes = 0
        self.left_out: set[int] = set(range(len(problem.first)))

    def copy(self) -> "_Plan":
        other = object.__new__(_Plan)
        other.at, other.free, other.on, other.cost = self.at[:], self.free[:], self.on[:], self.cost[:]
        other.total_cost, other.load, other.nodes = self.total_cost, self.load, self.nodes
        other.left_out = set(self.left_out)
        return other


class _Problem:
    """The problem as tables."""

    def __init__(self, problem: Problem) -> None:
        self.machines, self.costs = problem.machines, problem.costs
        self.weight = problem.network_weight
        self.free = [machine.free for machine in problem.machines]
        self.given = problem.given
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
        return sum(pair(at[one], at[other]) for one in self.first[job] for other in partners[one]) // 2

    def load_of(self, node: int, containers: Iterable[int]) -> int:
        """Eq. 6 of the node, for each job that is on it."""
        jobs = {self.job_of[one] for one in containers}
        if not jobs:
            return 0
        machine = self.machines[node]
        asked = sum(self.need[one][0] for one in containers)
        return len(jobs) * fitness_units(machine.used_gpus + asked, machine.total_gpus)

    def fitness(self, plan: _Plan) -> float:
        """Eq. 8."""
        score = self.weight * plan.total_cost + (1 - self.weight) * (plan.load / FITNESS_UNITS)
        return -score - plan.nodes

    def rank(self, plan: _Plan) -> float:
        """Eq. 8, and what is left out."""
        held_back = sum(self.placed_by_given[job] for job in plan.left_out)
        return self.fitness(plan) - UNPLACED * len(plan.left_out) - UNFAIR * held_back


def _partners(gang: Gang, begin: int) -> list[tuple[int, ...]]:
    """Whom each task exchanges gradients with: workers and servers each other, or the neighbours on the ring of workers."""
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


class _Change:
    """A plan being changed: what its touched nodes and jobs add is brought up to date at the end."""

    def __init__(self, problem: _Problem, plan: _Plan) -> None:
        self.problem, self.plan = problem, plan
        self._nodes: dict[int, tuple[int, ...]] = {}
        """Touched node → containers before."""
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

    def fits(self, node: int, one: int) -> bool:
        free, need = self.plan.free[node], self.problem.need[one]
        return (
            free[0] >= need[0]
            and free[1] >= need[1]
            and free[2] >= need[2]
            and free[3] >= need[3]
            and bool(self.problem.suits[one] >> node & 1)
        )

    def put(self, node: int, one: int) -> None:
        plan, free, need = self.plan, self.plan.free[node], self.problem.need[one]
        self._nodes.setdefault(node, plan.on[node])
        plan.free[node] = (free[0] - need[0], free[1] - need[1], free[2] - need[2], free[3] - need[3])
        plan.on[node] += (one,)
        plan.at[one] = node
        self._jobs.add(self.problem.job_of[one])

    def drop(self, job: int) -> None:
        """The job is left out as a whole."""
        plan = self.plan
        for one in self.problem.first[job]:
            node = plan.at[one]
            if node >= 0:
                self._nodes.setdefault(node, plan.on[node])
                free, need = plan.free[node], self.problem.need[one]
                plan.free[node] = (free[0] + need[0], free[1] + need[1], free[2] + need[2], free[3] + need[3])
                plan.on[node] = tuple(other for other in plan.on[node] if other != one)
                plan.at[one] = -1
        self._jobs.add(job)
        plan.left_out.add(job)

    def place(self, one: int, nodes: Sequence[int], *, near: bool) -> bool:
        """On the first of the nodes on which it fits; with `near` its partners' nodes and then their racks come first."""
        if near:
            at, machines = self.plan.at, self.problem.machines
            hosts = [at[other] for other in self.problem.partners[one] if at[other] >= 0]
            for node in sorted(set(hosts), key=lambda host: (-hosts.count(host), host)):
                if self.fits(node, one):
                    self.put(node, one)
                    return True
            racks = {machines[host].rack for host in hosts}
            for node in nodes if racks else ():
                if machines[node].rack in racks and self.fits(node, one):
                    self.put(node, one)
                    return True
        for node in nodes:
            if self.fits(node, one):
                self.put(node, one)
                return True
        return False

    def place_job(self, job: int, nodes: Sequence[int], *, near: bool) -> bool:
        """The whole gang or nothing of it."""
        self.plan.left_out.discard(job)
        containers = self.problem.first[job]
        if all(self.place(one, nodes, near=near) for one in containers):
            return True
        self.drop(job)
        return False

    def done(self) -> _Plan:
        plan, problem = self.plan, self.problem
        for job in self._jobs:
            now = 0 if job in plan.left_out else problem.cost_of(job, plan.at)
            plan.total_cost += now - plan.cost[job]
            plan.cost[job] = now
        for node, before in self._nodes.items():
            now_on = plan.on[node]
            plan.load += problem.load_of(node, now_on) - problem.load_of(node, before)
            plan.nodes += bool(now_on) - bool(before)
        return plan


class _Draws:
    """Random numbers, drawn by blocks."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._block: list[float] = []

    def unit(self) -> float:
        if not self._block:
            self._block = self._rng.random(DRAWS).tolist()
        return self._block.pop()

    def below(self, count: int) -> int:
        return int(self.unit() * count)

    def shuffled(self, count: int) -> list[int]:
        return [int(one) for one in self._rng.permutation(count)]


class _Run:
    """One run of the algorithm."""

    def __init__(self, problem: Problem, rng: np.random.Generator, *, near: bool) -> None:
        self.problem, self.draws, self.near = _Problem(problem), _Draws(rng), near
        self.given = self._given()
        self.population = [self.given]
        self.ranks = [self.problem.rank(self.given)]
        self.best = 0

    def _given(self) -> _Plan:
        change = _Change(self.problem, _Plan(self.problem))
        for job, place in enumerate(self.problem.given):
            if place:
                change.plan.left_out.discard(job)
                for one, node in zip(self.problem.first[job], place, strict=True):
                    change.put(node, one)
        return change.done()

    def populate(self) -> None:
        """First fit in the burst's order, then first fit and random fit in turn, in orders drawn anew."""
        jobs, nodes = len(self.problem.first), len(self.problem.free)
        for number in range(POPULATION - 1):
            change = _Change(self.problem, _Plan(self.problem))
            order = list(range(jobs)) if number == 0 else self.draws.shuffled(jobs)
            order.sort(key=lambda job: not self.problem.placed_by_given[job])
            where = list(range(nodes)) if number == 0 else self.draws.shuffled(nodes)
            random_fit = number % 2 == 1
            full: set[tuple[Need, int, int]] = set()
            for job in order:
                first = self.problem.first[job]
                kind = (self.problem.need[first[0]], self.problem.suits[first[0]], len(first))
                if kind in full:
                    continue
                if random_fit and nodes > 1:
                    begin = self.draws.below(nodes)
                    where = where[begin:] + where[:begin]
                if not change.place_job(job, where, near=number % 4 >= 2 and self.near):
                    full.add(kind)
            plan = change.done()
            self.population.append(plan)
            self.ranks.append(self.problem.rank(plan))
        self.best = max(range(POPULATION), key=lambda one: (self.ranks[one], -one))

    def select(self, *, worst: bool = False) -> int:
        """The winner of a tournament, or its loser, which is never the best plan."""
        drawn = [self.draws.below(POPULATION) for _ in range(TOURNAMENT)]
        if not worst:
            return max(drawn, key=lambda one: self.ranks[one])
        others = [one for one in drawn if one != self.best] or [(self.best + 1) % POPULATION]
        return min(others, key=lambda one: self.ranks[one])

    def child(self) -> _Plan:
        y = self.population[self.select()]
        change = _Change(self.problem, y.copy())
        if self.draws.unit() < CROSSOVER_SHARE:
            x = self.population[self.select()]
            orphans, avoid = self._insert(change, x)
        else:
            orphans, avoid = self._delete(change)
        self._repair(change, orphans, avoid, near=self.near and self.draws.unit() < 0.5)
        return change.done()

    def _used(self, plan: _Plan) -> list[int]:
        return [node for node, containers in enumerate(plan.on) if containers]

    def _insert(self, change: _Change, x: _Plan) -> tuple[list[int], set[int]]:
        """Fig. 8 (a) and (b)."""
        used = self._used(x)
        if not used:
            return [], set()
        node = used[self.draws.below(len(used))]
        plan, inserted = change.plan, x.on[node]
        cleared = {node} | {plan.at[one] for one in inserted if plan.at[one] >= 0}
        orphans: set[int] = set()
        for one in sorted(cleared):
            orphans.update(change.clear(one))
        for one in inserted:
            change.put(node, one)
            if self.problem.job_of[one] in plan.left_out:  # its other tasks come with it
                plan.left_out.discard(self.problem.job_of[one])
                orphans.update(self.problem.first[self.problem.job_of[one]])
        return sorted(orphans.difference(inserted)), cleared - {node}

    def _delete(self, change: _Change) -> tuple[list[int], set[int]]:
        """Fig. 9."""
        used = self._used(change.plan)
        if not used:
            return [], set()
        node = used[self.draws.below(len(used))]
        return sorted(change.clear(node)), {node}

    def _repair(self, change: _Change, orphans: list[int], avoid: set[int], *, near: bool) -> None:
        """Fig. 8 (c): first fit on the remaining nodes, unused ones last; then who is left out is tried again."""
        plan, problem = change.plan, self.problem
        used = [node for node, on in enumerate(plan.on) if on and node not in avoid]
        unused = [node for node, on in enumerate(plan.on) if not on and node not in avoid]
        nodes = used + unused + sorted(avoid)
        for one in orphans:
            job = problem.job_of[one]
            if job not in plan.left_out and not change.place(one, nodes, near=near):
                change.drop(job)
        waiting = sorted(plan.left_out, key=lambda job: (not problem.placed_by_given[job], job))
        for job in waiting[:MAX_TRIED_AGAIN]:
            change.place_job(job, nodes, near=near)

    def evolve(self, children: int) -> int:
        """Returns how many were made."""
        stale = 0
        for made in range(children):
            if stale >= STALE_CHILDREN:
                return made
            plan = self.child()
            rank = self.problem.rank(plan)
            loser = self.select(worst=True)
            if rank < self.ranks[loser]:
                stale += 1
                continue
            self.population[loser], self.ranks[loser] = plan, rank
            stale += 1
            if rank > self.ranks[self.best]:
                self.best, stale = loser, 0
        return children


def gga(
    problem: Problem, rng: np.random.Generator, *, near: bool = True, max_children: int = MAX_CHILDREN
) -> Found:
    """The best plan found; never worse than the given one. The same problem and generator give the same plan.

    `max_children` ≥ 0 bounds the work from outside. O(children · (nodes + containers)).
    """
    run = _Run(problem, rng, near=near)
    made = 0
    if problem.gangs and problem.machines:
        run.populate()
        containers = len(run.problem.job_of)
        children = max(MIN_CHILDREN, CHILD_CONTAINERS // (containers + len(problem.machines)))
        made = run.evolve(min(children, max_children))
    best = run.population[run.best]
    places = tuple(
        () if job in best.left_out else tuple(best.at[one] for one in first)
        for job, first in enumerate(run.problem.first)
    )
    given_fitness = run.problem.fitness(run.given)
    return Found(places, run.problem.fitness(best), given_fitness, best.nodes, made)
