"""The one view of a cell's nodes: what would be free, and what would fit, if jobs ended and others
started."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import refusals, why_not
from penstock.cluster.view import ClusterView, Undo
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.index import Free, set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TaskExited
from penstock.model.nouns.transitions import TaskStatus
from penstock.scheduling.make_room.preemption import node_ids
from penstock.scheduling.make_room.succession import Succession
from penstock_papers.baselines.baselines import FirstFit
from tests.support.cluster.random_cell import RandomCell, settings_of

PROFILES = ("srtf", "coda", "liquid", "penstock")
JOBS = 30
EVERY = 12
"""Steps of a cell between two looks."""


class Watched(RandomCell):
    """A random cell whose state is copied at times."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, settings_of(seed, PROFILES[seed % len(PROFILES)], 16), JOBS)
        self.states: list[CellState] = []

    def _step(self) -> bool:
        if self.steps % EVERY == 0:
            self.states.append(load(dump(self.state)))
        return super()._step()


@pytest.fixture(scope="module", params=range(4))
def seen(request: pytest.FixtureRequest) -> tuple[list[CellState], np.random.Generator]:
    """States of one cell under users, operators and faults; and random numbers."""
    cell = Watched(request.param)
    cell.run()
    return cell.states, np.random.default_rng(request.param)


Seen = tuple[list[CellState], np.random.Generator]


def free_of(view: ClusterView) -> dict[str, Free]:
    """What is free on each node."""
    return {node_id: view.free(node.ordinal) for node_id, node in view.state.nodes.items()}


def waiting(state: CellState) -> list[JobState]:
    return [job for job in state.jobs.values() if job.in_line and job.estimate is not None]


def changes(view: ClusterView, rng: np.random.Generator) -> Iterator[Undo]:
    """Some jobs end, others start: counted where they fit, or with GPUs and cores on nodes that are named."""
    for job in view.state.holding.values():
        if job.job_id not in view.ended and rng.random() < 0.5:
            yield view.release(job)
    for job in waiting(view.state):
        fit = view.fit(job.demand)
        if fit is None:
            continue
        if rng.random() < 0.5:
            yield view.claim(job.demand, fit)
            continue
        placed = view.place([(job, node_ids(view.state, job.demand, fit))])
        if not isinstance(placed, str):  # a claim that chose no GPUs may hold some of them
            yield partial(view.release_places, placed[0].tasks)


def test_trials_nest(seen: Seen) -> None:
    """What is tried within a trial is undone before it, at any depth; the cell itself never changes."""
    states, rng = seen
    depths = 0
    for state in states:
        before, view, undos = dump(state), ClusterView(state, state.stopping.values()), []
        found = [free_of(view)]
        for undo in changes(view, rng):
            undos.append(undo)
            found.append(free_of(view))
        while undos:
            assert free_of(view) == found.pop()
            undos.pop()()
            depths += 1
        assert [free_of(view)] == found
        assert dump(state) == before
    assert depths > len(states), "the trials changed something"


def test_an_end_that_is_tried_frees_what_the_end_frees(seen: Seen) -> None:
    """A job's tasks end, one after the other, whoever takes turns with it or comes after it: the ledger has
    free then what the view said before."""
    states, rng = seen
    for state in states:
        jobs = [job for job in state.holding.values() if not job.target]
        if not jobs:
            continue
        ends = [job for job in jobs if rng.random() < 0.5] or jobs
        view, early = ClusterView(state, ends), ClusterView(state)
        for job in reversed(ends):
            early.release(job)
        then = load(dump(state))
        for job in ends:
            for task_id, task in job.tasks.items():
                if task.status is not TaskStatus.EXITED:
                    evolve(then, exit_of(job, task_id, task.place.node_id))
        expected = {node_id: node.entered for node_id, node in then.nodes.items()}
        assert free_of(view) == free_of(early) == expected


def exit_of(job: JobState, task_id: str, node_id: str) -> TaskExited:
    """Its end, by itself."""
    return TaskExited(
        node_id=node_id,
        task_id=task_id,
        token=job.token,
        cause="exited",
        exit_code=0,
        started_ms=0,
        exited_ms=0,
    )


def test_fits_and_why_not_are_one_answer(seen: Seen) -> None:
    """A node that may take a task has no reason against it, and one that may not has one: for the search over
    all nodes, for the answer about one, for the counts of `why`, and for a view with as little free as
    that."""
    states, _ = seen
    asked = set()
    for state in states:
        view = ClusterView(state)
        for job in state.holding.values():
            view.release(job)()  # copies of the nodes answer as the nodes
        for job in state.jobs.values():
            if job.estimate is None:
                continue
            for need in job.demand.needs():
                where, index = job.demand.where, state.index
                fitting = index.candidates(need, where)
                texts = {node_id: why_not(state, node, need, where) for node_id, node in state.nodes.items()}
                assert fitting == set_of(state.nodes[one].ordinal for one, text in texts.items() if not text)
                assert fitting == view.candidates(need, where)
                refused = 0
                for nodes in refusals(index, need, where).values():
                    assert not nodes & refused, "one reason for each node"
                    refused |= nodes
                assert refused == index.known & ~index.gone & ~fitting
                asked |= {bool(text) for text in texts.values()}
    assert asked == {False, True}


def test_a_policy_reads_the_view_as_a_state(seen: Seen) -> None:
    """First fit chooses in a cell whose jobs have ended, one job after the other, as if each had started."""
    states, _ = seen
    policy, placed = FirstFit("fifo"), 0
    for state in states:
        view = ClusterView(state, [job for job in state.holding.values() if not job.target])
        then = view.as_state()
        for job in waiting(state):
            plan = policy.place(then, job, LazyRng(0, ""))
            assert (plan is None) == (view.tasks_that_fit(job.demand) < job.demand.tasks) or (
                job.demand.parameter_servers
            ), "where servers and workers block each other their order matters"
            if plan is not None and not isinstance(view.place([(job, plan.nodes)]), str):
                placed += 1
                assert {node_id: node.free() for node_id, node in then.nodes.items()} == free_of(view)
                assert all(node.entered == node.free() for node in then.nodes.values())
    assert placed


def test_a_unit_that_cannot_be_ordered_leaves_nothing_behind(seen: Seen) -> None:
    """Units are tried on what tasks leave that are being stopped. One of them has no place for its last task:
    who comes after it gets the GPUs, as if that unit had not been tried."""
    states, rng = seen
    refused = 0
    for state in states:
        ending, jobs, names = frozenset(state.jobs), waiting(state), sorted(state.nodes)
        units = [
            [(job, [str(rng.choice(names))] * job.demand.tasks)] for job in jobs if not job.spec.min_workers
        ]
        succession = Succession(ClusterView(state), ending)
        found = [succession.place(unit) for unit in units]
        without = Succession(ClusterView(state), ending)
        placed = [unit for unit, places in zip(units, found, strict=True) if places is not None]
        assert [without.place(unit) for unit in placed] == [places for places in found if places is not None]
        refused += len(units) - len(placed)
    assert refused
