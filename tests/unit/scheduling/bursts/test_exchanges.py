"""Stories of planned tasks that change places to come to their partners."""

from hypothesis import given, settings

from penstock.scheduling.bursts.burst_plans import (
    Change,
    Costs,
    Gang,
    Instance,
    Machine,
    Place,
    Plan,
    Problem,
)
from penstock.scheduling.bursts.exchanges import improved
from tests.unit.scheduling.bursts.test_burst import problems

EVERYWHERE = 0b1111
ENOUGH = 10_000


def burst(gangs: list[tuple[int, int]], free: list[int], places: list[Place]) -> tuple[Instance, Plan]:
    """Gangs as (workers, parameter servers), each task with one GPU, on nodes of so many free GPUs in one
    rack."""
    machines = [Machine(0, 0, 4, 4 - gpus, (gpus, 9, 99, 99)) for gpus in free]
    need = (1, 1, 1, 1)
    problem = Problem(
        machines,
        [Gang(workers, need, servers, need, EVERYWHERE, EVERYWHERE) for workers, servers in gangs],
        Costs((10,), (20,), 40),
        0.5,
        places,
    )
    return planned(problem, places)


def planned(problem: Problem, places: list[Place]) -> tuple[Instance, Plan]:
    instance = Instance(problem)
    change = Change(instance, Plan(instance))
    for job, place in enumerate(places):
        if place:
            change.plan.left_out.discard(job)
            for one, node in zip(instance.first[job], place, strict=True):
                change.put(node, one)
    return instance, change.done()


def test_two_gangs_that_are_split_over_full_nodes_come_together() -> None:
    """No node has room, so neither can move alone; and no operator on whole nodes brings them together."""
    instance, plan = burst([(2, 0), (2, 0)], [2, 2], [(0, 1), (0, 1)])
    better, _ = improved(instance, plan, ENOUGH)
    assert better.cost == [0, 0]
    assert plan.at == [0, 1, 0, 1], "the plan that was given is as it was"


def test_a_server_changes_places_with_a_worker_of_its_own_gang() -> None:
    """Beside one of its two workers it has one pair over the network; alone it has two."""
    instance, plan = burst([(2, 1)], [2, 1], [(0, 0, 1)])
    better, _ = improved(instance, plan, ENOUGH)
    assert better.cost == [10]


def test_who_moves_to_its_partner_leaves_a_node_unused() -> None:
    instance, plan = burst([(2, 0)], [2, 1], [(0, 1)])
    better, _ = improved(instance, plan, ENOUGH)
    assert (better.at, better.nodes, better.free[1][0]) == ([0, 0], 1, 1)


def test_no_more_moves_are_looked_at_than_asked_for() -> None:
    instance, plan = burst([(2, 0)] * 4, [4, 4], [(0, 1)] * 4)
    better, looked = improved(instance, plan, 0)
    assert (looked, better.at) == (0, plan.at)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_nobody_is_left_out_and_no_plan_gets_worse(problem: Problem) -> None:
    """Figures that are brought up to date move by move are those of the plan counted from nothing."""
    instance, plan = planned(problem, list(problem.given))
    better, _ = improved(instance, plan, ENOUGH)
    assert better.left_out == plan.left_out
    assert instance.rank(better) >= instance.rank(plan) - 1e-9
    places: list[Place] = [
        () if job in better.left_out else tuple(better.at[one] for one in first)
        for job, first in enumerate(instance.first)
    ]
    _, anew = planned(problem, places)
    assert (better.free, better.cost, better.nodes) == (anew.free, anew.cost, anew.nodes)
    assert (better.total_cost, better.loads) == (anew.total_cost, anew.loads)
    assert all(left >= 0 for free in better.free for left in free)
