"""Stories of the migrator's core: whom it watches, when it proposes, and what the placer makes of it."""

import pytest

from penstock.model.event import Event
from penstock.model.external_events import NodeCordoned, TelemetrySampled
from penstock.model.ledger_events import ProposalAnswered
from penstock.model.moves import MAX_MIGRATIONS, JobConverged, MoveDecided
from penstock.model.proposals import ANSWER_WITHIN_MS, MigrationProposed
from penstock.model.settings import Convergence, PlacerSettings
from penstock.policies.convergence import Category
from penstock_services.migrator.core.migrator import Migrator, migrates
from penstock_services.placer.core.step import Step
from tests.support.driver import CellDriver, estimate, kinds, node_spec

INTERVAL_MS = 30_000


class WatchedCell(CellDriver):
    """A cell under profile `specon` whose migrator sees each fact at once. Two nodes of four GPUs."""

    def __init__(self, profile: str = "specon") -> None:
        self.migrator = Migrator()
        super().__init__(PlacerSettings(profile=profile, convergence=Convergence(interval_ms=INTERVAL_MS)))
        self.join(node_spec("n1"), node_spec("n2"))

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        for fact in step.facts:
            self.migrator.see(self.state, fact, self.state.now_ms)
        return step

    def runs(self, *jobs: str) -> None:
        for job_id in jobs:
            self.submit(job_id, need=estimate(1))
            self.start(job_id)

    def reports(self, job_id: str, loss: float) -> None:
        task_id, task = next(iter(self.job(job_id).tasks.items()))
        sample = TelemetrySampled(node_id=task.place.node_id, task_id=task_id, at_ms=0, loss=loss)
        self.migrator.observe(self.state, sample, self.now_ms)

    def proposed(self) -> MigrationProposed | None:
        return self.migrator.next(self.state, self.now_ms)

    def where(self, job_id: str) -> str:
        return next(iter(self.job(job_id).tasks.values())).place.node_id

    def converge(self, job_id: str) -> MigrationProposed | None:
        """It reports what it gains, look by look, until the migrator proposes something."""
        for loss in (1.0, 0.5, 0.497, 0.4945, 0.4925, 0.491, 0.490):
            self.reports(job_id, loss)
            self.now_ms += INTERVAL_MS
            if (found := self.proposed()) is not None:
                return found
        return None


@pytest.fixture
def cell() -> WatchedCell:
    """a and c on n1, b on n2, in the order in which they are spread."""
    found = WatchedCell()
    found.runs("a", "b", "c")
    assert [found.where(job_id) for job_id in "abc"] == ["n1", "n2", "n1"]
    return found


def test_a_converged_job_makes_room_for_those_that_gain(cell: WatchedCell) -> None:
    """Two others run on its node; n2 has one job. It moves once, and is never judged again."""
    cell.runs("d", "e")
    assert cell.where("e") == "n1"
    proposal = cell.converge("a")
    assert proposal is not None
    assert (proposal.job_id, proposal.nodes, proposal.cause) == ("a", ("n2",), "converged")
    assert "2 of 3 jobs on n1 still gain" in proposal.reason
    assert "n1 5" in proposal.reason
    step = cell.feed(proposal)
    assert kinds(step) == [
        "migration.proposed", "job.converged", "move.decided", "stop.decided", "proposal.answered",
    ]  # fmt: skip
    decided = next(fact for fact in step.facts if isinstance(fact, MoveDecided))
    assert (decided.cause, decided.by) == ("converged", "migrator")
    cell.exit("a.1.w0", None, cause="stopped", signal=15)
    cell.start("a")
    assert cell.where("a") == "n2"
    assert (cell.job("a").migrations, cell.job("a").converged_ms is not None) == (1, True)
    assert cell.converge("a") is None


def test_one_that_is_best_where_it_is_stays_and_that_is_a_fact(cell: WatchedCell) -> None:
    """Three jobs on each node, and of those on its own it has converged. A restarted migrator does not judge it again."""
    cell.runs("d", "e", "f")
    proposal = cell.converge("a")
    assert proposal is not None
    assert proposal.nodes == ("n1",)
    step = cell.feed(proposal)
    assert kinds(step) == ["migration.proposed", "job.converged", "proposal.answered"]
    fact = next(fact for fact in step.facts if isinstance(fact, JobConverged))
    assert fact.moves is False
    assert cell.where("a") == "n1"
    cell.migrator = Migrator()
    assert cell.converge("a") is None


def test_alone_among_converged_jobs_it_is_left_alone(cell: WatchedCell) -> None:
    """Only one of the jobs on its node still gains: line 15 asks for more than one."""
    assert cell.where("c") == "n1"
    assert cell.converge("a") is None
    assert cell.migrator.categories().get("a") is Category.CONVERGED


def test_on_a_node_where_nothing_may_start_nobody_makes_room(cell: WatchedCell) -> None:
    """An operator has cordoned its node: it stays, and the migrator goes on."""
    cell.runs("d", "e")
    cell.feed(NodeCordoned(node_id="n1", by="ops/ana", reason="a fan"))
    assert cell.converge("a") is None


def test_who_does_not_run_is_not_watched(cell: WatchedCell) -> None:
    """Losses of an earlier attempt, of an ended job, of no task, or of a task that nobody knows: nothing happens."""
    task = {"node_id": "n1", "at_ms": 0, "loss": 1.0}
    for task_id in (None, "a.7.w0", "nobody.1.w0", "odd"):
        cell.migrator.observe(cell.state, TelemetrySampled(task_id=task_id, **task), cell.now_ms)  # type: ignore[arg-type]
    cell.exit("a.1.w0")
    cell.migrator.observe(cell.state, TelemetrySampled(task_id="a.1.w0", **task), cell.now_ms)  # type: ignore[arg-type]
    assert cell.migrator.observed == 0
    assert cell.proposed() is None
    assert cell.migrator.due_ms(cell.state) is None


def test_a_job_that_ends_is_forgotten(cell: WatchedCell) -> None:
    cell.reports("a", 1.0)
    assert cell.migrator.due_ms(cell.state) is not None
    cell.exit("a.1.w0")
    assert cell.migrator.categories().get("a") is None
    cell.proposed()
    assert cell.migrator.due_ms(cell.state) is None


def test_nothing_is_due_while_nobody_reports(cell: WatchedCell) -> None:
    """An idle cell wakes nobody: after a restart's first question there is nothing to wait for."""
    cell.proposed()
    assert cell.migrator.due_ms(cell.state) is None
    assert not migrates(PlacerSettings(profile="fifo"))
    assert not migrates(PlacerSettings(profile="of-a-newer-placer"))


def test_a_proposal_without_an_answer_is_made_again_later(cell: WatchedCell) -> None:
    """The placer was away. Nothing else is proposed until then; the same state gives the same id, so that both count once."""
    cell.runs("d", "e")
    first = cell.converge("a")
    assert first is not None
    assert cell.proposed() is None
    cell.now_ms += ANSWER_WITHIN_MS
    cell.now_ms += INTERVAL_MS
    again = cell.proposed()
    assert again is not None
    assert again.proposal_id == first.proposal_id
    cell.feed(first)
    answer = cell.feed(again).facts[-1]
    assert isinstance(answer, ProposalAnswered)
    assert answer.copy_of
    assert cell.job("a").migrations == 1


@pytest.mark.parametrize("cause", ["converged", "rebalance", "faster", ""])
def test_moves_of_one_job_are_bounded_whoever_asks(cell: WatchedCell, cause: str) -> None:
    """A migrator that has lost its mind moves a job to and fro: the placer lets it do so a few times, and operators always."""
    accepted = 0
    for number in range(3 * MAX_MIGRATIONS):
        asked = MigrationProposed(
            proposal_id=f"p{number}",
            proposer="migrator",
            job_id="a",
            nodes=("n2" if cell.where("a") == "n1" else "n1",),
            reason="x",
            cause=cause,  # type: ignore[arg-type]
        )
        answer = cell.feed(asked).facts[-1]
        assert isinstance(answer, ProposalAnswered)
        if answer.verdict == "refused":
            assert "once" in answer.detail or "no more than 4" in answer.detail
            continue
        accepted += 1
        cell.exit(f"a.{cell.job('a').attempt}.w0", None, cause="stopped", signal=15)
        cell.start("a")
    assert accepted == (1 if cause in ("converged", "rebalance") else MAX_MIGRATIONS)
    by_hand = MigrationProposed(
        proposal_id="by-hand", proposer="gateway", job_id="a", by="ops/ana", reason="x",
        nodes=("n2" if cell.where("a") == "n1" else "n1",),
    )  # fmt: skip
    assert cell.feed(by_hand).facts[-1].verdict == "accepted"  # type: ignore[attr-defined]
