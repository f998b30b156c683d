"""Shares that are accounted for when they are asked for, against the account of each change."""

from random import Random

import pytest
from msgspec.structs import replace

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.proposals import CoresProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting import crowding
from penstock.scheduling.acting.crowding import Crowding
from penstock_services.migrator.core.migrator import CHANGES
from penstock_services.placer.core.step import Step
from tests.support.cluster.crowd import share_of
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


class Eager(Crowding):
    """All jobs account for each change at once."""

    def changed(self, state: CellState, job_id: str, now_ms: int) -> None:
        super().changed(state, job_id, now_ms)
        self._settle_all()


class Watched(CellDriver):
    """A cell of which two see each change that the migrator sees."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.eager = Crowding(), Eager()

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        for fact in step.facts:
            if (subject := CHANGES.get(type(fact))) is not None:
                self.late.changed(self.state, subject(fact), self.now_ms)
                self.eager.changed(self.state, subject(fact), self.now_ms)
        return step

    def reports(self, job_id: str, done: int) -> None:
        """The job's first task has done so many steps; a step takes as long as its present share makes it."""
        job = self.job(job_id)
        task_id, task = next(iter(job.tasks.items()))
        fact = StepsMeasured(
            node_id=task.place.node_id,
            task_id=task_id,
            token=job.token,
            at_ms=0,
            done=done,
            total=1_000,
            steps=done,
            step_ms=100.0 * share_of(self.state, job) ** -0.7,
        )
        self.late.measured(self.state, fact, self.now_ms)
        self.eager.measured(self.state, fact, self.now_ms)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_steps", [crowding.MAX_STEPS, 12])
def test_late_accounts_are_those_of_each_change(
    seed: int, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of up to three tasks start, end task by task, get other cores and report their steps, many at one
    moment, on more and more nodes. Who accounts for the shares when asked, and who does at each change, agree
    to the last bit, and the shares are those of a recount."""
    monkeypatch.setattr(crowding, "MAX_STEPS", max_steps)
    rng = Random(f"late {seed}")
    cell = Watched()
    cell.join(node_spec("n1"))
    compared = learned = 0
    for number in range(150):
        if number % 50 == 49:
            cell.join(node_spec(f"late{number}"))
        cell.now_ms += rng.choice([0, 0, 7_000, 60_001])
        running = [job for job in cell.state.holding.values() if job.status is JobStatus.RUNNING]
        job = rng.choice([None, *running])
        kind = rng.random()
        if job is None or kind < 0.3:
            job_id = f"j{number}"
            spec = job_spec(workers=rng.choice([1, 1, 2, 3]), checkpoint="signal")
            need = estimate(gpus=rng.choice([0, 0, 1]), cores=rng.choice([1, 2]))
            cell.submit(job_id, spec, replace(need, run_ms=600_000))
            cell.start(job_id)
        elif kind < 0.5:
            task_id = rng.choice(list(job.tasks))
            cores = rng.randint(1, 4)
            cell.feed(
                CoresProposed(
                    proposal_id=f"p{number}",
                    proposer="operator",
                    by="ann",
                    task_id=task_id,
                    cores=cores,
                    reason="wants them",
                )
            )
        elif kind < 0.7:
            task = rng.choice(list(job.tasks.values()))
            if task.status is TaskStatus.RUNNING:
                cell.exit(task.place.task_id)
        else:
            cell.reports(job.job_id, rng.randint(1, 1_000))
        for job in cell.state.holding.values() if rng.random() < 0.1 else ():
            found = cell.late.progress(cell.state, job, cell.now_ms)
            assert found == cell.eager.progress(cell.state, job, cell.now_ms)
            if found is not None:
                compared += 1
                assert found.share == pytest.approx(share_of(cell.state, job))
        for gpus in (False, True):
            assert cell.late.exponent(gpus=gpus) == cell.eager.exponent(gpus=gpus)
            learned += cell.late.exponent(gpus=gpus) > 0.0
    assert compared > 20, compared
    assert learned > 20, learned


def test_jobs_that_ran_before_the_first_call_are_counted() -> None:
    """The migrator is started anew beside four jobs on one node: one of them ends, and another one has the
    share that a recount finds."""
    cell = Watched()
    cell.join(node_spec("n1"))
    for number in range(4):
        cell.submit(f"j{number}", need=estimate(gpus=0, cores=1))
        cell.start(f"j{number}")
    anew = Crowding()
    cell.exit("j0.1.w0")
    anew.changed(cell.state, "j0", cell.now_ms)
    found = anew.progress(cell.state, cell.job("j1"), cell.now_ms)
    assert found is not None
    assert found.share == pytest.approx(share_of(cell.state, cell.job("j1"))) == pytest.approx(1 / 3)


def test_a_question_may_be_ahead_of_the_next_record() -> None:
    """The migrator is started anew and asks half a second after the latest record; the next record is older
    than the question."""
    cell = Watched()
    cell.join(node_spec("n1"))
    for number in range(3):
        cell.submit(f"j{number}", need=estimate(gpus=0, cores=1))
        cell.start(f"j{number}")
    anew = Crowding()
    assert anew.progress(cell.state, cell.job("j1"), cell.now_ms + 500) is not None
    for number in range(2):
        cell.now_ms += 100
        cell.exit(f"j{2 * number}.1.w0")
        anew.changed(cell.state, f"j{2 * number}", cell.now_ms)
        found = anew.progress(cell.state, cell.job("j1"), cell.now_ms + 1_000)
        assert found is not None
        assert (
            found.share
            == pytest.approx(share_of(cell.state, cell.job("j1")))
            == pytest.approx(1 / (2 - number))
        )
