"""Stories of bursts that are planned at once by the grouping genetic algorithm."""

import pickle
from collections.abc import Sequence
from random import Random
from time import perf_counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.proposals import ProposedUnit
from penstock.model.settings import PlacerSettings
from penstock.policies import burst
from penstock.policies.burst import BurstQuestion
from penstock.policies.burst_plans import Costs, Gang, Machine, Place, Problem
from penstock.policies.gga import gga
from penstock.policies.profiles import profile_for
from tests.support.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.policies.test_candidates import something_happens

LONG_WINDOW_MS = 60_000


def cell(profile: str = "liquid", nodes: int = 2, *, exact: bool = False) -> CellDriver:
    """Nodes of four GPUs; the second arrival opens a window."""
    found = CellDriver(
        PlacerSettings(profile=profile, batch_window_ms=LONG_WINDOW_MS, batch_arrivals=2, batch_exact=exact)
    )
    found.join(*(node_spec(f"n{number}") for number in range(nodes)))
    return found


def planned(found: CellDriver) -> Sequence[ProposedUnit]:
    stage = profile_for(found.state.settings).batch
    assert stage is not None
    question = stage.question(found.state)
    if question is None:
        return ()
    answer = stage.solve(pickle.loads(pickle.dumps(question)))
    assert answer == stage.solve(question), "the same question has the same answer"
    return stage.units(found.state, answer)


@pytest.mark.parametrize("profile", ["liquid", "liquid-levels", "penstock"])
def test_who_waits_in_a_window_is_planned_at_once(profile: str) -> None:
    found = cell(profile)
    assert planned(found) == ()
    for number in range(4):
        found.submit(f"j{number}", job_spec(workers=2), estimate(1))
    waiting = set(found.state.queue.values())
    assert waiting, "the window is open"
    units = planned(found)
    assert {unit.jobs[0].job_id for unit in units} == waiting
    assert all(len(set(unit.jobs[0].nodes)) == 1 for unit in units), "nobody is split"
    assert "one after the other" in units[0].explanation


def test_a_job_that_has_ended_meanwhile_or_fits_nowhere_is_left_out() -> None:
    """One waits that wants more GPUs than the cell has: the others are planned beside it, and it is nowhere."""
    found = cell()
    for number in range(3):
        found.submit(f"j{number}", job_spec(workers=1), estimate(1))
    found.submit("huge", job_spec(workers=64), estimate(4))
    names = {unit.jobs[0].job_id for unit in planned(found)}
    assert names
    assert "huge" not in names


@pytest.mark.parametrize("profile", ["liquid", "liquid-levels", "penstock"])
def test_an_operator_has_bursts_planned_as_published(profile: str) -> None:
    """The cell's setting `batch_exact` leaves out what Penstock adds to the algorithm. On a burst of gangs of two and three that has to fill six nodes both plans start all that
    the immediate path would start and cost no more than its plan, and they differ."""
    found = {}
    for exact in (False, True):
        a_cell = cell(profile, 6, exact=exact)
        for number, workers in enumerate((1, 3, 2, 3, 2, 3, 3, 2, 3, 2)):
            a_cell.submit(f"j{number}", job_spec(workers=workers), estimate(1))
        stage = profile_for(a_cell.state.settings).batch
        assert stage is not None
        question = stage.question(a_cell.state)
        assert isinstance(question, BurstQuestion)
        plan = gga(
            question.problem,
            np.random.default_rng(question.seed),
            exact=exact,
            max_children=question.max_children,
        )
        assert dict(stage.solve(question).places) == {
            job_id: tuple(question.node_ids[node] for node in place)
            for job_id, place in zip(question.job_ids, plan.places, strict=True)
            if place
        }
        assert all(place for place, given in zip(plan.places, question.problem.given, strict=True) if given)
        assert plan.fitness >= plan.given_fitness
        found[exact] = plan
    assert found[True].places != found[False].places
    assert found[True].fitness <= found[False].fitness


def test_thousands_of_identical_jobs_are_planned_in_time() -> None:
    everywhere = (1 << 128) - 1
    machines = [Machine(0, 0, 8, 0, (8, 64, 1 << 20, 1 << 20))] * 128
    gangs = [Gang(1, (1, 1, 1, 1), 0, (0, 0, 0, 0), everywhere, everywhere)] * 3_000
    began_s = perf_counter()
    found = gga(Problem(machines, gangs, Costs((128,), (128,), 128), 0.5, [()] * 3_000), rng())
    assert sum(bool(place) for place in found.places) == 1_024
    assert perf_counter() - began_s < 20


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to six gangs on up to four nodes; the given plan is first fit, or nobody's."""
    count = draw(st.integers(1, 4))
    everywhere = (1 << count) - 1
    machines = [
        Machine(number % 2, 0, 4, 4 - (free := draw(st.integers(0, 4))), (free, 8, 100, 100))
        for number in range(count)
    ]
    gangs = [
        Gang(
            draw(st.integers(1, 3)),
            (draw(st.integers(0, 3)), 1, 10, 0),
            draw(st.integers(0, 2)),
            (draw(st.integers(0, 1)), 1, draw(st.sampled_from([0, 10, 1_000])), 0),
            draw(st.integers(0, everywhere)),
            everywhere,
        )
        for _ in range(draw(st.integers(0, 6)))
    ]
    costs = Costs((2, 2), (count,), count)
    empty = Problem(machines, gangs, costs, draw(st.sampled_from([0.0, 0.5, 1.0])), [()] * len(gangs))
    if draw(st.booleans()):
        return empty
    return empty._replace(given=gga(empty, rng(), max_children=0).places)


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_plans_keep_to_what_is_free_and_are_never_worse_than_the_given_one(
    problem: Problem, exact: bool
) -> None:
    """Gangs are placed as a whole, no node over what it has free, none on a node that does not suit; whom the given plan starts starts."""
    found = gga(problem, rng(), exact=exact, max_children=60)
    assert found == gga(problem, rng(), exact=exact, max_children=60)
    free = [list(machine.free) for machine in problem.machines]
    for gang, place in zip(problem.gangs, found.places, strict=True):
        assert len(place) in (0, gang.workers + gang.servers)
        for rank, node in enumerate(place):
            is_worker = rank < gang.workers
            need = gang.worker if is_worker else gang.server
            free[node] = [has - wants for has, wants in zip(free[node], need, strict=True)]
            assert (gang.worker_nodes if is_worker else gang.server_nodes) >> node & 1
    assert all(left >= 0 for node in free for left in node)
    starts: Sequence[Place] = problem.given
    assert all(place for place, before in zip(found.places, starts, strict=True) if before)
    if [bool(place) for place in found.places] == [bool(place) for place in starts]:
        assert found.fitness >= found.given_fitness - 1e-9


def test_settings_without_a_window_do_not_change_what_a_profile_is() -> None:
    plain = msgspec.structs.replace(PlacerSettings(), profile="fifo")
    assert profile_for(plain).batch is None


@pytest.mark.parametrize("profile", ["liquid", "penstock"])
def test_the_early_answer_in_a_full_cell_is_that_of_the_immediate_path(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs come and end; at most times no node has room for a worker of any of them, and then the immediate path starts none."""
    found, random = cell(profile), Random(3)
    stage = profile_for(found.state.settings).batch
    assert stage is not None
    full = 0
    for number in range(120):
        something_happens(found, random, number)
        asked, has_room = stage.question(found.state), burst._has_room(found.state)
        with monkeypatch.context() as patched:
            patched.setattr(burst, "_has_room", lambda _: True)
            assert asked == stage.question(found.state)
        full += bool(found.state.queue) and not has_room
    assert full > 5
