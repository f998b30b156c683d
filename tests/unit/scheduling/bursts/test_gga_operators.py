"""Stories of the genetic algorithm's operators, checked against Liquid's description: crossover (§5.3, Fig.
8), mutation (Fig. 9), tournaments, and the first population."""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from penstock.scheduling.bursts.burst_plans import Change, Costs, Gang, Machine, Place, Plan, Problem
from penstock.scheduling.bursts.gga import CROSSOVER_SHARE, POPULATION, GeneticSearch
from penstock_papers.liquid import ExactSearch
from tests.unit.scheduling.bursts.test_burst import problems, rng

GPUS = 4
A, B, C, D, E, F = range(6)
CROSSOVER, MUTATION = CROSSOVER_SHARE / 2, (1 + CROSSOVER_SHARE) / 2


class Script:
    """Random numbers that the test chooses."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def unit(self) -> float:
        return self._numbers.pop(0)

    def below(self, count: int) -> int:
        number = self._numbers.pop(0)
        assert number < count
        return int(number)

    def shuffled(self, count: int) -> list[int]:
        return list(range(count))


def search(
    gpus: list[int],
    nodes: int,
    *,
    workers: list[int] | None = None,
    given: list[Place] | None = None,
    seed: int = 7,
    exact: bool = True,
) -> GeneticSearch:
    """Jobs with so many GPUs for each worker, one worker where nothing else is said, on idle nodes of four
    GPUs in one rack."""
    everywhere = (1 << nodes) - 1
    counts = [1] * len(gpus) if workers is None else workers
    gangs = [
        Gang(count, (one, 1, 1, 1), 0, (0, 0, 0, 0), everywhere, everywhere)
        for count, one in zip(counts, gpus, strict=True)
    ]
    problem = Problem(
        [Machine(0, 0, GPUS, 0, (GPUS, 99, 99, 99))] * nodes,
        gangs,
        Costs((nodes,), (nodes,), nodes),
        0.5,
        [()] * len(gpus) if given is None else given,
    )
    return (ExactSearch if exact else GeneticSearch)(problem, np.random.default_rng(seed))


def plan(run: GeneticSearch, *places: Place) -> Plan:
    change = Change(run.problem, Plan(run.problem))
    for job, place in enumerate(places):
        for one, node in zip(run.problem.first[job], place, strict=False):
            change.plan.left_out.discard(job)
            change.put(node, one)
    return change.done()


def child(run: GeneticSearch, parents: list[Plan], *numbers: float) -> Plan:
    """Of a population of these alone."""
    run.population = (parents * POPULATION)[:POPULATION]
    run.ranks = [run.problem.rank(one) for one in run.population]
    run.draws = Script(*numbers)  # type: ignore[assignment]
    return run.child()


def groups(found: Plan) -> list[set[int]]:
    """Node → its containers."""
    return [set(on) for on in found.on]


def test_a_node_of_one_plan_replaces_all_nodes_of_the_other_that_hold_one_of_its_containers() -> None:
    """Fig. 8. Node 0 of X with A and B is inserted into Y. Y's nodes 1 and 2, where these two were, are
    cleared as a whole, with D and E, and so is its node 0, with C. These three are placed again by first fit
    on the remaining nodes: C beside A and B, D beside F; E, which has no room there, on a node that Y does
    not use rather than on a cleared one."""
    run = search([1, 1, 2, 3, 2, 1], nodes=5)
    x = plan(run, (0,), (0,), (1,), (2,), (3,), (3,))
    y = plan(run, (1,), (2,), (0,), (1,), (2,), (3,))
    before = groups(y)
    found = child(run, [x, y], 1, 1, 1, CROSSOVER, 0, 0, 0, 0)
    assert groups(found) == [{A, B, C}, set(), set(), {D, F}, {E}]
    assert (groups(y), groups(x)) == (before, [{A, B}, {C}, {D}, {E, F}, set()]), "parents stay as they were"


def test_nodes_of_the_other_plan_without_a_duplicate_stay_together() -> None:
    """Fig. 8. The inserted node 2 was not in use by Y: only the node with its one container A is cleared, and
    all other groups of Y are inherited."""
    run = search([2, 1, 2, 2], nodes=4)
    x = plan(run, (2,), (0,), (1,), (1,))
    y = plan(run, (0,), (0,), (1,), (1,))
    found = child(run, [x, y], 1, 1, 1, CROSSOVER, 0, 0, 0, 2)
    assert groups(found) == [set(), {C, D}, {A, B}, set()]


def test_a_gang_that_is_left_out_comes_back_with_all_of_its_tasks() -> None:
    """The inserted node has one worker of a gang that Y leaves out: its other worker is placed by first fit.
    A gang is never in part in a plan."""
    run = search([1, 3], nodes=3, workers=[2, 1])
    x = plan(run, (1, 2), (0,))
    y = plan(run, (), (0,))
    found = child(run, [x, y], 1, 1, 1, CROSSOVER, 0, 0, 0, 1)
    assert found.left_out == set()
    assert groups(found) == [{2, 1}, {0}, set()]


def test_a_container_without_a_place_takes_its_whole_gang_out() -> None:
    """Y has a gang over two full nodes. The inserted node of X takes the place of one of its workers; the
    other one goes, too, for half of a gang cannot run."""
    run = search([4, 4, 4], nodes=2, workers=[2, 1, 1])
    x, y = plan(run, (), (0,), (1,)), plan(run, (0, 1))
    found = child(run, [x, y], 1, 1, 1, CROSSOVER, 0, 0, 0, 0)
    assert groups(found) == [{2}, {3}]
    assert found.left_out == {0}, "its second node is free again, and another left-out job has it"


def test_mutation_clears_a_node_and_places_its_containers_first_fit_on_the_others() -> None:
    """Fig. 9. Node 1 with B and C is cleared. B goes to node 0, the first with room, though it would fill
    node 3 and node 2 has the most room; C, for which node 0 then has too little, to node 2."""
    run = search([2, 1, 2, 1, 3], nodes=4)
    y = plan(run, (0,), (1,), (1,), (2,), (3,))
    found = child(run, [y], 0, 0, 0, MUTATION, 1)
    assert groups(found) == [{A, B}, set(), {C, D}, {E}]
    assert groups(y) == [{A}, {B, C}, {D}, {E}], "the parent stays as it was"


def test_mutation_takes_unused_nodes_last_and_the_cleared_one_after_them() -> None:
    """Fig. 9 deletes node 0 from the plan: B goes beside A, C to node 2, which was not in use. Only D, which
    was left out, gets the cleared node: no other is left."""
    run = search([2, 2, 2, 4], nodes=3)
    y = plan(run, (1,), (0,), (0,))
    assert groups(child(run, [y], 0, 0, 0, MUTATION, 0)) == [{D}, {A, B}, {C}]


def test_a_tournament_is_won_by_the_fittest_of_three_and_lost_by_the_worst() -> None:
    """Plans 4, 9 and 2 are sampled. Selection takes the fittest of them, not of all; replacement the worst of
    them, and never the best plan of all."""
    run = search([1], nodes=1)
    run.ranks, run.best = [float(-((7 * one) % POPULATION)) for one in range(POPULATION)], 0
    run.draws = Script(4, 9, 2, 4, 9, 2, 0, 3, 0, 0, 0, 0)  # type: ignore[assignment]
    assert [run.ranks[one] for one in (4, 9, 2)] == [-12, -15, -14]
    assert run.select() == 4
    assert run.select(worst=True) == 9
    assert run.select(worst=True) == 3
    assert run.select(worst=True) == 1, "the best plan is not replaced, though it alone was sampled"


def test_a_child_replaces_one_plan_and_the_best_plan_survives() -> None:
    run = search([2, 1, 3, 1, 2, 1, 2, 1], nodes=12, workers=[2, 5, 2, 3, 3, 4, 2, 3])
    run.populate()
    replaced = 0
    for _ in range(100):
        plans, ranks = list(run.population), list(run.ranks)
        run.evolve(1)
        changed = [place for place in range(POPULATION) if run.population[place] is not plans[place]]
        assert len(changed) <= 1
        assert all(run.ranks[place] >= ranks[place] for place in changed), "a worse child is not let in"
        assert run.ranks == [run.problem.rank(one) for one in run.population]
        assert run.ranks[run.best] == max(run.ranks) >= max(ranks)
        replaced += len(changed)
    assert 0 < replaced < 100


def test_the_population_is_the_given_plan_then_first_fit_and_random_fit_in_turn() -> None:
    """Four jobs that fit on any of six nodes together. First fit packs them on the first node of its order,
    and the first one's order is the burst's own; random fit begins anew for each job."""
    given: list[Place] = [(5,), (4,), (3,), (2,)]
    run = search([1, 1, 1, 1], nodes=6, given=given)
    run.populate()
    assert run.population[0].at == [5, 4, 3, 2]
    assert run.population[1].at == [0, 0, 0, 0]
    first_fit, random_fit = run.population[1::2], run.population[2::2]
    assert [one.nodes for one in first_fit] == [1] * len(first_fit)
    assert len({one.at[0] for one in first_fit}) > 2, "orders of nodes differ"
    assert all(one.nodes > 1 for one in random_fit)
    assert len({tuple(one.at) for one in random_fit}) == len(random_fit)


def test_random_fit_goes_on_to_a_node_with_room() -> None:
    """Jobs of three GPUs: wherever it begins, it goes on to the next node with room."""
    run = search([3, 3, 3], nodes=3)
    run.populate()
    assert all(sorted(one.at) == [0, 1, 2] for one in run.population[1:])


@pytest.mark.parametrize("exact", [True, False])
def test_the_seed_decides_the_population(exact: bool) -> None:
    """A plan of a ledger can be made again: the same seed gives the same plans, another one others."""

    def population(seed: int) -> list[list[int]]:
        run = search([1, 1, 1, 1], nodes=6, seed=seed, exact=exact)
        run.populate()
        return [one.at for one in run.population]

    assert population(1) == population(1)
    assert population(1) != population(2)


@settings(max_examples=60, deadline=None)
@drawn(problems(), st.booleans())
def test_jobs_without_room_are_passed_over_as_if_they_had_been_tried(problem: Problem, exact: bool) -> None:
    """Each gang comes twice. A search that tries every left-out job makes the same plans as one that looks at
    the free GPUs and tries one job of a kind."""
    twice = problem._replace(
        gangs=[*problem.gangs, *problem.gangs], given=[*problem.given, *[()] * len(problem.gangs)]
    )
    quick, slow = ((ExactSearch if exact else GeneticSearch)(twice, rng()) for _ in range(2))
    slow.problem.kind, slow.problem.gpus = list(range(len(twice.gangs))), [0] * len(twice.gangs)
    for run in (quick, slow):
        run.populate()
        run.evolve(60)
    for one, other in zip(quick.population, slow.population, strict=True):
        assert (one.at, one.on, one.left_out) == (other.at, other.on, other.left_out)
        assert (one.free, one.cost, one.loads, one.nodes) == (
            other.free,
            other.cost,
            other.loads,
            other.nodes,
        )
