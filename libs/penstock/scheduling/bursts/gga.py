"""Grouping genetic algorithm (GGA): places a burst of gangs at once; groups are nodes, and operators work on
whole nodes.

Source: Liquid §5.3, eq. 7 and 8, Figs 8 and 9; grouping encoding after Falkenauer, J. Heuristics 2(1), '96.

    GeneticFitness(plan) = −Σ over jobs: Score(job's plan) − NumNU            (eq. 8; NumNU: nodes that the
    burst uses)

- Population: the given plan (sequential best fit), first fit and random fit, over random job orders and node
  orders.
- Selection: tournaments; the child replaces the loser of another tournament, so average plans can survive,
  and the best one always does.
- Crossover (Fig. 8): a node of plan X with its containers is inserted into plan Y; other nodes of Y that hold
  one of these are cleared, and their other containers are placed again. Mutation (Fig. 9): a random node is
  cleared, its containers are placed on the others.

Interpretation and departures:
- Used GPUs of eq. 6 count the whole burst, so a plan's fitness does not depend on the order of its jobs.
- In the paper a plan with an unplaced container is invalid. A burst may need more than the cell has, so a
  whole job may be left out, with penalty UNPLACED; the penalty for a job that the given plan places is
  UNFAIR: a job that would start at once is never delayed for others.
- Containers are placed again by first fit, on the plan's nodes and then on unused ones. In about every other
  child nodes that hold their partners come first.
- The cost of a child is that of its changed nodes. The number of children is bounded by CHILD_CONTAINERS /
  containers, so that the time stays flat as jobs and nodes grow.
- A population without a better plan for STALE_CHILDREN is replaced by a new one. The best plan of each is
  improved by exchanges of tasks between nodes (`penstock.scheduling.bursts.exchanges`): operators on whole
  nodes cannot improve two nodes that both stay in use.

The paper has one population, only first fit and no exchanges: `penstock_papers.liquid.ExactSearch`.
"""

from typing import NamedTuple

import numpy as np

from penstock.scheduling.bursts.burst_plans import Change, Instance, Need, Place, Plan, Problem
from penstock.scheduling.bursts.exchanges import improved

POPULATION, TOURNAMENT, CROSSOVER_SHARE, MAX_CHILDREN = 16, 3, 0.6, 2_000
"""The source names none. With half or twice of any of them, and of the next five, 12 bursts of 8 to 120 jobs
have 0.29 to 0.31 of first fit's cost by eq. 8, and as many jobs start."""
CHILD_CONTAINERS = 300_000  # children × containers of one run
STALE_CHILDREN = 200  # children without a better plan before a new population
MAX_IN_VAIN = 2  # consecutive populations without a better plan
MAX_EXCHANGES = 10_000  # evaluated at the end of each population
MAX_TRIED_AGAIN = 16  # left-out jobs that are tried again in each child
DRAWS = 4_096  # random numbers drawn at once: 33 ns each instead of 158


class Found(NamedTuple):
    """The best plan; jobs with empty places wait. `fitness` and `given_fitness`: eq. 8 without jobs that are
    left out."""

    places: tuple[Place, ...]
    fitness: float
    given_fitness: float
    nodes: int
    children: int


class Draws:
    """Random numbers, generated in blocks."""

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


class GeneticSearch:
    """One run of the algorithm."""

    RESTARTS = True
    """Whether a stale population is replaced by a new one."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.problem, self.draws = Instance(problem), Draws(rng)
        self.given = self._given()
        self.found = self.given
        """The best plan of all populations."""
        self.population: list[Plan] = []
        self.ranks: list[float] = []
        self.best = 0

    def _given(self) -> Plan:
        change = Change(self.problem, Plan(self.problem))
        for job, place in enumerate(self.problem.given):
            if place:
                change.plan.left_out.discard(job)
                for one, node in zip(self.problem.first[job], place, strict=True):
                    change.put(node, one)
        return change.done()

    def populate(self) -> None:
        """A new population: the given plan, first fit in the burst's order, then alternately first fit and
        random fit, in random orders."""
        jobs, nodes = len(self.problem.first), len(self.problem.free)
        self.population, self.ranks = [self.given], [self.problem.rank(self.given)]
        for number in range(POPULATION - 1):
            change = Change(self.problem, Plan(self.problem))
            order = list(range(jobs)) if number == 0 else self.draws.shuffled(jobs)
            order.sort(key=lambda job: not self.problem.placed_by_given[job])
            where = list(range(nodes)) if number == 0 else self.draws.shuffled(nodes)
            random_fit, near = number % 2 == 1, self.filled_near(number)
            full: set[tuple[Need, int, int]] = set()
            for job in order:
                first = self.problem.first[job]
                kind = (self.problem.need[first[0]], self.problem.suits[first[0]], len(first))
                if kind in full:
                    continue
                if random_fit and nodes > 1:
                    begin = self.draws.below(nodes)
                    where = where[begin:] + where[:begin]
                if not change.place_job(job, where, near=near):
                    full.add(kind)
            plan = change.done()
            self.population.append(plan)
            self.ranks.append(self.problem.rank(plan))
        self.best = max(range(POPULATION), key=lambda one: (self.ranks[one], -one))

    def filled_near(self, number: int) -> bool:
        """Whether plan `number` of a population is filled with nodes that hold a container's partners
        first."""
        return number % 4 >= 2

    def repaired_near(self) -> bool:
        """Whether the containers of a child are placed again on such nodes first."""
        return self.draws.unit() < 0.5

    def exchanged(self, plan: Plan) -> Plan:
        """The plan, improved by exchanges of tasks between nodes."""
        return improved(self.problem, plan, MAX_EXCHANGES)[0]

    def settle(self) -> bool:
        """Improves the population's best plan by exchanges and stores it if it is the best so far; returns
        whether it is."""
        plan = self.exchanged(self.population[self.best])
        if self.problem.rank(plan) <= self.problem.rank(self.found):
            return False
        self.found = plan
        return True

    def select(self, *, worst: bool = False) -> int:
        """The winner of a tournament, or its loser, which is never the best plan."""
        sampled = [self.draws.below(POPULATION) for _ in range(TOURNAMENT)]
        if not worst:
            return max(sampled, key=self.ranks.__getitem__)
        others = [one for one in sampled if one != self.best] or [(self.best + 1) % POPULATION]
        return min(others, key=self.ranks.__getitem__)

    def child(self) -> Plan:
        y = self.population[self.select()]
        change = Change(self.problem, y.copy())
        if self.draws.unit() < CROSSOVER_SHARE:
            x = self.population[self.select()]
            orphans, avoid = self.insert_node(change, x)
        else:
            orphans, avoid = self.clear_node(change)
        self.repair(change, orphans, avoid, near=self.repaired_near())
        return change.done()

    def _used(self, plan: Plan) -> list[int]:
        return [node for node, containers in enumerate(plan.on) if containers]

    def insert_node(self, change: Change, x: Plan) -> tuple[list[int], set[int]]:
        """Crossover, Fig. 8 (a) and (b). Returns containers that lost their place, and the nodes that were
        cleared for the inserted ones."""
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
            if self.problem.job_of[one] in plan.left_out:  # its other tasks are placed, too
                plan.left_out.discard(self.problem.job_of[one])
                orphans.update(self.problem.first[self.problem.job_of[one]])
        return sorted(orphans.difference(inserted)), cleared - {node}

    def clear_node(self, change: Change) -> tuple[list[int], set[int]]:
        """Mutation, Fig. 9. Returns the containers that lost their place, and their node."""
        used = self._used(change.plan)
        if not used:
            return [], set()
        node = used[self.draws.below(len(used))]
        return sorted(change.clear(node)), {node}

    def repair(self, change: Change, orphans: list[int], avoid: set[int], *, near: bool) -> None:
        """Fig. 8 (c): first fit on the remaining nodes, unused ones last; then left-out jobs are tried
        again."""
        plan, problem = change.plan, self.problem
        used = [node for node, on in enumerate(plan.on) if on and node not in avoid]
        unused = [node for node, on in enumerate(plan.on) if not on and node not in avoid]
        nodes = used + unused + sorted(avoid)
        for one in orphans:
            job = problem.job_of[one]
            if job not in plan.left_out and not change.place(one, nodes, near=near):
                change.drop(job)
        waiting = sorted(plan.left_out, key=problem.turn.__getitem__)
        full: set[int] = set()  # kinds for which there is no room on the nodes as they are now
        for job in waiting[:MAX_TRIED_AGAIN]:
            kind = problem.kind[job]
            if kind in full:
                continue
            if change.place_job(job, nodes, near=near):
                full.clear()
            else:
                full.add(kind)

    def evolve(self, children: int) -> int:
        """Makes children and returns their number. A stale population is replaced, until `MAX_IN_VAIN`
        consecutive ones have found no better plan."""
        stale = in_vain = 0
        for made in range(children):
            if stale >= STALE_CHILDREN and made + STALE_CHILDREN < children and self.RESTARTS:
                in_vain = 0 if self.settle() else in_vain + 1
                if in_vain == MAX_IN_VAIN:
                    return made
                self.populate()
                stale = 0
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
        self.settle()
        return children


def gga(
    problem: Problem,
    rng: np.random.Generator,
    *,
    search: type[GeneticSearch] = GeneticSearch,
    max_children: int = MAX_CHILDREN,
) -> Found:
    """The best plan found; never worse than the given one. The same problem and random generator give the
    same plan.

    `search`: the variant of the algorithm. `max_children` ≥ 0: the caller's bound on the work.
    O(children · (nodes + containers)).
    """
    run = search(problem, rng)
    made = 0
    if problem.gangs and problem.machines:
        run.populate()
        containers = len(run.problem.job_of)
        children = CHILD_CONTAINERS // (containers + len(problem.machines))
        made = run.evolve(min(children, max_children))
    best = run.found
    places = tuple(
        () if job in best.left_out else tuple(best.at[one] for one in first)
        for job, first in enumerate(run.problem.first)
    )
    given_fitness = run.problem.fitness(run.given)
    return Found(places, run.problem.fitness(best), given_fitness, best.nodes, made)
