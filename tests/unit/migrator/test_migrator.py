"""Stories of the migrator's core: whom it watches, when it proposes, and what the placer makes of it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.progress import MAX_RUNS, Run
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.decisions.moves import MAX_MIGRATIONS, JobConverged, MoveDecided
from penstock.model.inputs.external_events import NodeCordoned, TelemetrySampled
from penstock.model.nouns.settings import Convergence, PlacerSettings
from penstock.model.proposals import ANSWER_WITHIN_MS, MigrationProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting.convergence import Category
from penstock_services.migrator.core.migrator import Migrator, migrates
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

INTERVAL_MS = 30_000


class WatchedCell(CellDriver):
    """A cell under profile `specon` whose migrator sees each fact at once. Two nodes of four GPUs."""

    def __init__(self, profile: str = "specon") -> None:
        self.migrator = Migrator()
        self.samples: list[tuple[TelemetrySampled, int]] = []
        """All samples that were reported, each with its time: the retained telemetry."""
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

    def reports(self, job_id: str, loss: float, attempt: int = 0) -> None:
        """`attempt`: 0: the present one."""
        task_id = f"{job_id}.{attempt or self.job(job_id).attempt}.w0"
        sample = TelemetrySampled(node_id="n1", task_id=task_id, at_ms=0, loss=loss)
        self.samples.append((sample, self.now_ms))
        self.migrator.observe(self.state, sample, self.now_ms)

    def passes(self, duration_ms: int, *others: Migrator) -> None:
        """Time passes, and the migrator makes each evaluation when it is due; so do `others`."""
        until_ms = self.now_ms + duration_ms
        for migrator in (self.migrator, *others):
            while (due_ms := migrator.due_ms(self.state)) is not None and due_ms <= until_ms:
                migrator.next(self.state, max(self.now_ms, due_ms))
        self.now_ms = until_ms

    def asked_to_move(self, job_id: str) -> None:
        """An operator moves it to the other node; it is being stopped."""
        there = "n2" if self.where(job_id) == "n1" else "n1"
        asked = MigrationProposed(
            proposal_id=f"by-hand-{self.state.seq}",
            proposer="gateway",
            job_id=job_id,
            by="ops/ana",
            reason="x",
            nodes=(there,),
        )
        assert self.feed(asked).facts[-1].verdict == "accepted"  # type: ignore[attr-defined]

    def stops(self, job_id: str) -> None:
        """Its process ends, and the next attempt is launched where it was to move."""
        self.exit(f"{job_id}.{self.job(job_id).attempt}.w0", None, cause="stopped", signal=15)

    def restarted(self) -> Migrator:
        """A migrator that goes on from a snapshot of the ledger's state, and has read the retained
        telemetry."""
        found, state = Migrator(), load(dump(self.state))
        for sample, at_ms in self.samples:
            found.observe(state, sample, at_ms)
        found.next(state, self.now_ms)
        return found

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
    assert "2 of 3 jobs on n1 still improve" in proposal.reason
    assert "n1 5" in proposal.reason
    step = cell.feed(proposal)
    assert kinds(step) == [
        "migration.proposed",
        "job.converged",
        "move.decided",
        "stop.decided",
        "proposal.answered",
    ]
    decided = next(fact for fact in step.facts if isinstance(fact, MoveDecided))
    assert (decided.cause, decided.by) == ("converged", "migrator")
    cell.exit("a.1.w0", None, cause="stopped", signal=15)
    cell.start("a")
    assert cell.where("a") == "n2"
    assert (cell.job("a").moves.migrations, cell.job("a").moves.converged_ms is not None) == (1, True)
    assert cell.converge("a") is None


def test_one_that_is_best_where_it_is_stays_and_that_is_a_fact(cell: WatchedCell) -> None:
    """Three jobs on each node, and of those on its own it has converged. A restarted migrator does not judge
    it again."""
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
    """Losses of an earlier attempt, of an ended job, of no task, or of a task that nobody knows: nothing
    happens."""
    task = {"node_id": "n1", "at_ms": 0, "loss": 1.0}
    for task_id in (None, "a.7.w0", "nobody.1.w0", "odd"):
        cell.migrator.observe(cell.state, TelemetrySampled(task_id=task_id, **task), cell.now_ms)
    cell.exit("a.1.w0")
    cell.migrator.observe(cell.state, TelemetrySampled(task_id="a.1.w0", **task), cell.now_ms)
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
    """The placer was away. Nothing else is proposed until then; the same state gives the same id, so that
    both count once."""
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
    assert cell.job("a").moves.migrations == 1


@pytest.mark.parametrize("cause", ["converged", "rebalance", "faster", ""])
def test_moves_of_one_job_are_bounded_whoever_asks(cell: WatchedCell, cause: str) -> None:
    """A migrator that has lost its mind moves a job to and fro: the placer lets it do so a few times, and
    operators always."""
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
        proposal_id="by-hand",
        proposer="gateway",
        job_id="a",
        by="ops/ana",
        reason="x",
        nodes=("n2" if cell.where("a") == "n1" else "n1",),
    )
    assert cell.feed(by_hand).facts[-1].verdict == "accepted"  # type: ignore[attr-defined]


FALLING = (1.0, 0.5, 0.2, 0.1)
FLAT = (0.0995, 0.0985, 0.0977, 0.0970, 0.0963)
"""A twentieth of the range in all, with ever smaller gains: converged by the range of `FALLING`, progress by
its own."""


def trained(cell: WatchedCell, losses: Sequence[float]) -> None:
    for loss in losses:
        cell.reports("a", loss)
        cell.passes(INTERVAL_MS)


@pytest.mark.parametrize("profile", ["specon", "balance"])
def test_a_restart_knows_the_losses_of_earlier_attempts(profile: str) -> None:
    """A job is moved by an operator in the middle of an interval, and is away for an hour. Its range is that
    of both attempts, also for a migrator that starts from a snapshot: it comes to the same category, and
    evaluates next at the same time."""
    cell = WatchedCell(profile)
    cell.runs("a")
    trained(cell, FALLING)
    cell.passes(INTERVAL_MS // 3)
    cell.asked_to_move("a")
    cell.passes(2_000)
    cell.stops("a")
    cell.passes(3_600_000)
    assert cell.restarted().categories() == cell.migrator.categories(), "while it is launched"
    cell.start("a")
    cell.passes(0)
    assert cell.restarted().due_ms(cell.state) == cell.migrator.due_ms(cell.state), "before its next loss"
    trained(cell, FLAT)
    assert cell.migrator.categories() == {"a": Category.CONVERGED}
    again = cell.restarted()
    assert again.categories() == cell.migrator.categories()
    assert again.windows("a") == cell.migrator.windows("a")
    assert again.due_ms(cell.state) == cell.migrator.due_ms(cell.state)


def test_a_late_sample_of_an_earlier_attempt_is_ignored() -> None:
    """The node's last samples reach the log after the job was stopped, or after it runs elsewhere: neither
    its range nor its next evaluation changes."""
    cell = WatchedCell()
    cell.runs("a")
    trained(cell, FALLING)
    cell.asked_to_move("a")
    cell.reports("a", 900.0)
    cell.stops("a")
    cell.passes(10_000)
    cell.start("a")
    observed, due_ms = cell.migrator.observed, cell.migrator.due_ms(cell.state)
    cell.reports("a", 1_000.0, attempt=1)
    assert (cell.migrator.observed, cell.migrator.due_ms(cell.state)) == (observed, due_ms)
    trained(cell, FLAT)
    assert cell.migrator.categories() == cell.restarted().categories() == {"a": Category.CONVERGED}


def test_a_request_of_the_past_is_not_made_again(cell: WatchedCell) -> None:
    """It asked to give up its place while no migrator ran, and then its learning rate was lowered: it
    progresses, so a restarted migrator leaves it where it is."""
    cell.runs("d", "e")
    for loss in (1.0, 0.5, 0.497, 0.4945, 0.4925, 0.491, 0.490, 0.490, 0.2, 0.1):
        cell.reports("a", loss)
        cell.now_ms += INTERVAL_MS
    again = Migrator()
    for sample, at_ms in cell.samples:
        again.observe(cell.state, sample, at_ms)
    assert again.next(cell.state, cell.now_ms) is None
    assert again.categories()["a"] is Category.PROGRESSING


def test_the_state_has_the_latest_runs_of_a_job() -> None:
    """It fails again and again: each run from when its tasks ran to its end, 16 at most."""
    cell = WatchedCell()
    cell.submit("a", job_spec(attempts=20, backoff_ms=1_000), need=estimate(1))
    began_ms = []
    for attempt in range(1, 19):
        cell.passes(700)
        cell.start("a")
        began_ms.append(cell.now_ms)
        cell.passes(5_000)
        cell.exit(f"a.{attempt}.w0", 1)
        cell.at(cell.now_ms - 1_000_000 + 60_000)
    expected = [Run(number + 1, at_ms, at_ms + 5_000) for number, at_ms in enumerate(began_ms)]
    assert list(cell.job("a").progress.runs) == expected[-MAX_RUNS:]
    assert len(expected) > MAX_RUNS


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["specon", "balance"]),
    st.lists(
        st.tuples(
            st.sampled_from(["loss", "loss", "late", "away", "fails"]),
            st.floats(0.0, 1.0),
            st.integers(0, 5 * INTERVAL_MS // 2),
        ),
        max_size=16,
    ),
)
def test_a_restart_comes_to_the_same(profile: str, story: Sequence[tuple[str, float, int]]) -> None:
    """Losses at any times, moves, failures and late samples: the same category and the same next evaluation
    as the migrator that was there all the time."""
    cell = WatchedCell(profile)
    cell.submit("a", job_spec(attempts=100, backoff_ms=1), need=estimate(1))
    cell.start("a")
    for what, value, duration_ms in story:
        if what == "loss":
            cell.reports("a", value)
        elif what == "late":
            cell.reports("a", value, attempt=max(1, cell.job("a").attempt - 1))
        else:
            if what == "away":
                cell.asked_to_move("a")
                cell.passes(duration_ms // 2)
                cell.stops("a")
            else:
                cell.exit(f"a.{cell.job('a').attempt}.w0", 1)
                cell.at(cell.now_ms - 1_000_000 + 1_000)
            cell.passes(duration_ms // 3)
            cell.start("a")
        cell.passes(duration_ms)
        assert cell.restarted().categories() == cell.migrator.categories()
    again = cell.restarted()
    cell.passes(8 * INTERVAL_MS, again)
    assert again.categories() == cell.migrator.categories()
    assert again.due_ms(cell.state) == cell.migrator.due_ms(cell.state)
