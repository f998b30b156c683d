"""Stages of a profile that plan by first fit: small enough that a test can say what their plans are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import ProposedJob, ProposedUnit
from penstock.scheduling.definition import Definition, NoSettings
from penstock.scheduling.profiles import INSTALLED
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.regroup import Answer, GroupPlan, PlannedGroup, Question
from penstock_papers.baselines.baselines import FirstFit

Asked = tuple[tuple[str, int], ...]
"""(job, its tasks) of who waits."""


class FirstFitBatch:
    """All who wait, in the order of the queue, in turn on the nodes that run the fewest tasks."""

    def question(self, state: CellState) -> tuple[Asked, tuple[str, ...]] | None:
        waiting = tuple((job_id, state.jobs[job_id].demand.tasks) for job_id in state.queue.values())
        fewest = min((len(node.tasks) for node in state.nodes.values()), default=0)
        nodes = sorted(name for name, node in state.nodes.items() if len(node.tasks) == fewest)
        return (waiting, tuple(nodes)) if waiting and nodes else None

    def solve(self, question: tuple[Asked, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
        waiting, nodes = question
        places = iter(nodes * (1 + sum(tasks for _, tasks in waiting) // len(nodes)))
        return {job_id: tuple(next(places) for _ in range(tasks)) for job_id, tasks in waiting}

    def units(self, state: CellState, answer: Mapping[str, tuple[str, ...]]) -> Sequence[ProposedUnit]:
        return [
            ProposedUnit(jobs=(ProposedJob(job_id=job_id, nodes=nodes),), explanation="first fit")
            for job_id, nodes in answer.items()
            if job_id in state.jobs and state.jobs[job_id].in_line
        ]


class FirstFitRegroup:
    """The same of one kind of question that a regroup stage is asked; it stops nobody and forms no group."""

    exact = False
    fills = False
    beside = False

    def question(self, state: CellState) -> Question | None:
        return Question("small", (), (), 0, state.now_ms) if state.queue else None

    def solve(self, question: Question) -> Answer:
        return Answer((PlannedGroup(("nobody",)),))

    def plan(self, state: CellState, answer: Answer) -> GroupPlan:
        batch = FirstFitBatch()
        question = batch.question(state)
        return GroupPlan([] if question is None else batch.units(state, batch.solve(question)), (), ())


@contextmanager
def known_as(name: str, **stages: Any) -> Iterator[PlacerSettings]:
    """A profile of this name with first fit and these stages, in this process; yields settings for it."""

    def make(settings: PlacerSettings, own: NoSettings) -> Profile:
        return Profile(name, FirstFit(name), **stages)

    with mock.patch.dict(INSTALLED.loaded, {name: Definition(make)}):
        yield PlacerSettings(profile=name)
