"""Local search by moves and swaps: brings tasks of a planned burst to their partners' nodes.

Source: own, in addition to Liquid §5.3, whose operators move whole nodes and cannot swap tasks between two
half-used nodes. The moves are those of the assignment problem: one task moves to a node with room, or two
tasks of different nodes swap places. Only nodes of the task's own partners are tried, since the distance to
them is the largest term of eq. 8, and no other node is nearer. First improvement: the first move with a gain
is made, until no move has one.
"""

from collections.abc import Iterator

from penstock.scheduling.bursts.burst_plans import Change, Instance, Need, Plan
from penstock.scheduling.place.liquid import FITNESS_UNITS
from penstock.scheduling.remaining_time import ROUNDING


def improved(problem: Instance, plan: Plan, most: int) -> tuple[Plan, int]:
    """A plan that is at least as good by eq. 8 and leaves out the same jobs, and the number of evaluated
    moves, at most about `most`.

    O(moves · containers of a gang).
    """
    search = _Exchanges(problem, plan.copy(), most)
    while search.sweep():
        pass
    return search.plan, search.looked


class _Exchanges:
    def __init__(self, problem: Instance, plan: Plan, most: int) -> None:
        self._problem, self.plan, self._most = problem, plan, most
        self.looked = 0

    def sweep(self) -> bool:
        """One pass over all jobs whose tasks are apart; returns whether any task moved."""
        moved = False
        for job, containers in enumerate(self._problem.first):
            if self.plan.cost[job]:
                for one in containers:
                    while self.looked < self._most and self._move(one):
                        moved = True
        return moved and self.looked < self._most

    def _move(self, one: int) -> bool:
        at = self.plan.at
        nodes = {at[partner] for partner in self._problem.partners[one]} - {at[one]}
        for node in sorted(nodes):
            for other in self._instead(one, node):
                self.looked += 1
                if self._gain(one, node, other) > ROUNDING:
                    self._make(one, node, other)
                    return True
        return False

    def _instead(self, one: int, node: int) -> Iterator[int | None]:
        """Tasks that could swap places with this one; None: no swap is necessary. Of tasks of one gang with
        the same demand and role only the first is tried."""
        problem, plan = self._problem, self.plan
        source, need = plan.at[one], problem.need[one]
        if not problem.suits[one] >> node & 1:
            return
        if _within(need, plan.free[node], (0, 0, 0, 0)):
            yield None
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for other in plan.on[node]:
            kind = problem.job_of[other], problem.partners[other]
            if kind in seen or kind == (problem.job_of[one], problem.partners[one]):
                continue
            seen.add(kind)
            theirs = problem.need[other]
            if (
                problem.suits[other] >> source & 1
                and _within(need, plan.free[node], theirs)
                and _within(theirs, plan.free[source], need)
            ):
                yield other

    def _gain(self, one: int, node: int, other: int | None) -> float:
        """Gain of eq. 8."""
        problem, plan = self._problem, self.plan
        at, source = plan.at, plan.at[one]
        jobs = {problem.job_of[one]} | (set() if other is None else {problem.job_of[other]})
        here = tuple(task for task in plan.on[source] if task != one)
        there = (*tuple(task for task in plan.on[node] if task != other), one)
        at[one] = node
        if other is not None:
            at[other] = source
            here += (other,)
        cost = sum(problem.cost_of(job, at) - plan.cost[job] for job in jobs)
        at[one] = source
        if other is not None:
            at[other] = node
        load = problem.load_of(source, here) - plan.loads[source]
        load += problem.load_of(node, there) - plan.loads[node]
        nodes = bool(here) - 1  # the other node is in use already, by the task's partner
        return -problem.weight * cost - (1 - problem.weight) * load / FITNESS_UNITS - nodes

    def _make(self, one: int, node: int, other: int | None) -> None:
        change, source = Change(self._problem, self.plan), self.plan.at[one]
        change.take(one)
        if other is not None:
            change.take(other)
            change.put(source, other)
        change.put(node, one)
        change.done()


def _within(need: Need, free: Need, given_back: Need) -> bool:
    return all(asked <= left + back for asked, left, back in zip(need, free, given_back, strict=True))
