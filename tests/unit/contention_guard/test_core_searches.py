"""Stories of the contention-guard's searches for cores: what is tried, when a probe has ended, and where they
end."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
from msgspec.structs import replace

from penstock.ledger.fold.evolve import evolve
from penstock.model.decisions.adjustments import (
    MAX_CORE_CHANGES,
    MAX_CORE_PROBES,
    AdjustmentCause,
    CoresDecided,
    TaskAdjusted,
)
from penstock.model.decisions.ledger_events import LedgerAccepted
from penstock.model.decisions.orders import SetCores
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.nouns.settings import Contention
from penstock.model.proposals import CoresProposed, PlanProposed, ProposedJob, ProposedUnit, ThrottleProposed
from penstock.scheduling.acting.settling import MAX_REPORTS, QUIET
from penstock.scheduling.acting.telemetry_windows import WINDOW_MS
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.contention_guard.core.searches import MEASURES_MS
from tests.support.cluster.driver import estimate, job_spec
from tests.support.cluster.guarded_cell import GuardedCell, node

UsersCores = Literal["at_least", "respect", "override"]
A = "a.1.w0"
SETTLES = 5
"""Windows until the speed of steps of 100 ms has settled."""


def up_to(best: int) -> Callable[[int], float]:
    """Step time: linear up to the best count, slightly worse beyond (CODA Fig. 3)."""
    return lambda cores: 100.0 / (min(cores, best) / best - 0.002 * max(0, cores - best))


@pytest.fixture
def cell() -> GuardedCell:
    found = GuardedCell()
    found.join(node())
    return found


def settled(cell: GuardedCell) -> CoresProposed:
    found = cell.proposals[-1]
    assert isinstance(found, CoresProposed)
    assert found.cause == "settled"
    return found


@pytest.mark.parametrize("best", [1, 2, 3, 5, 8, 12, 20])
def test_a_training_gets_the_fewest_cores_that_keep_its_speed(cell: GuardedCell, best: int) -> None:
    """It starts with three cores, as its category says, on a node with 24."""
    cell.runs("a", cores=3)
    cell.trains(A, up_to(best))
    assert settled(cell).cores == cell.cores(A)
    assert up_to(best)(cell.cores(A)) <= 1.06 * up_to(best)(best)
    probes = [one for one in cell.proposals if one.cause == "probe"]
    assert len(probes) <= MAX_CORE_PROBES
    assert not cell.guard._searches
    task = cell.job("a").tasks[A]
    assert (task.cores.probes, task.cores.settled) == (len(probes), True)


def test_codas_walk_goes_in_steps_of_one_first_down() -> None:
    cell = GuardedCell(Contention(search="walk"))
    cell.join(node())
    cell.runs("a", cores=3)
    cell.trains(A, up_to(5))
    assert [(one.cause, one.cores) for one in cell.proposals if isinstance(one, CoresProposed)] == [
        ("probe", 2),
        ("probe", 4),
        ("probe", 5),
        ("probe", 6),
        ("settled", 5),
    ]
    assert "5 cores at 10 iterations/s" in settled(cell).reason


def test_what_a_probe_takes_stays_the_jobs_until_the_search_ends(cell: GuardedCell) -> None:
    """A training with all cores of its node is tried with half of them while a job waits for some: that job
    must not get those that the training may need again, or it would stay slow."""
    cell.runs("a", cores=24)
    cell.submit("b", need=estimate(0, cores=8))
    slow = up_to(20)
    cell.trains(A, slow, windows=SETTLES)
    assert cell.cores(A) < 24
    assert str(cell.job("b").status) == "queued"
    cell.trains(A, slow)
    assert slow(cell.cores(A)) <= 1.06 * slow(20)


def test_cores_that_it_does_not_need_start_who_waits_for_them(cell: GuardedCell) -> None:
    cell.runs("a", cores=24)
    cell.submit("b", need=estimate(0, cores=8))
    cell.trains(A, up_to(4))
    assert cell.cores(A) <= 6
    assert cell.job("b").tasks


def test_nothing_is_tried_before_the_speed_has_settled(cell: GuardedCell) -> None:
    """The first steps of a training are slow: caches fill, kernels are chosen."""
    cell.runs("a", cores=4)
    for step_ms in (900.0, 500.0, 250.0, 100.0, 100.0, 100.0, 100.0):
        cell.passes()
        cell.sends("n1", A, step_ms=step_ms)
        assert cell.acts() == []
    cell.passes()
    assert [one.cause for one in cell.acts()] == ["probe"]


def test_a_probe_ends_when_the_speed_has_settled_and_not_before(cell: GuardedCell) -> None:
    """What comes in the window of the node's answer does not count, and each report that differs begins anew;
    silence says that nothing changes."""
    cell.runs("a", cores=4)
    cell.trains(A, lambda cores: 100.0, windows=SETTLES)
    assert [one.cause for one in cell.proposals] == ["probe"]
    cell.sends("n1", A, step_ms=10.0)  # in the window in which the node answered
    assert cell.acts() == []
    cell.passes(60_000)
    assert cell.acts() == []
    cell.sends("n1", A, step_ms=60.0)
    assert cell.acts() == []
    cell.passes()
    cell.sends("n1", A, step_ms=50.0)
    assert cell.acts() == []
    cell.passes(QUIET * (WINDOW_MS + 50) - 1)
    assert cell.acts() == []
    cell.passes(1)
    following = cell.acts()
    assert [one.cause for one in following] == ["probe"]
    assert "8 cores at 20 iterations/s" in following[0].reason


def test_a_job_that_never_settles_keeps_the_cores_of_its_start(cell: GuardedCell) -> None:
    """Its steps become longer and longer."""
    cell.runs("a", cores=4)
    cell.trains(A, lambda cores: 100.0, windows=SETTLES)
    assert cell.cores(A) == 8
    for number in range(MAX_REPORTS):
        cell.passes()
        cell.sends("n1", A, step_ms=100.0 * 1.3**number)
        cell.acts()
    assert cell.cores(A) == 4
    assert "does not settle" in settled(cell).reason


def test_a_job_that_falls_silent_in_a_probe_keeps_the_cores_of_its_start(cell: GuardedCell) -> None:
    """Its script evaluates for an hour."""
    cell.runs("a", cores=4)
    cell.trains(A, lambda cores: 100.0, windows=SETTLES)
    cell.passes(MEASURES_MS - 1)
    assert cell.acts() == []
    due_ms = cell.guard.due_ms(cell.state)
    assert due_ms == cell.now_ms + 1
    cell.passes(1)
    cell.acts()
    assert cell.cores(A) == 4
    assert "in time" in settled(cell).reason


def test_utilisation_serves_where_no_steps_are_reported(cell: GuardedCell) -> None:
    """A script without the SDK."""
    cell.runs("a", cores=3)
    for _ in range(60):
        cell.passes()
        cell.sends("n1", A, gpu_utilisation_percent=min(96.0, 8.0 * cell.cores(A)))
        cell.acts()
    assert cell.cores(A) == 12
    assert "% of its GPU" in settled(cell).reason


def test_a_silent_job_is_left_alone(cell: GuardedCell) -> None:
    """It reports neither steps nor utilisation: there is nothing to search by, and nothing is sent."""
    cell.runs("a")
    cell.sends("n1", A, cpu_stalled_percent=50.0)
    assert cell.acts() == []
    assert cell.guard.due_ms(cell.state) is None


def test_what_a_node_cannot_do_ends_the_search(cell: GuardedCell) -> None:
    """Its node answers that the kernel refuses."""
    cell.runs("a")
    cell.obeys = False
    cell.trains(A, lambda cores: 100.0, windows=SETTLES)
    [order] = [order for order in cell.orders() if isinstance(order, SetCores)]
    cell.feed(
        TaskAdjusted(
            node_id="n1",
            task_id=A,
            token=cell.job("a").token,
            order_token=order.token,
            what="cores",
            enforced="",
            detail="not permitted",
        )
    )
    cell.acts()
    assert "not permitted" in settled(cell).reason
    assert settled(cell).cores == 4


def test_a_probe_that_is_refused_ends_it_with_the_best_that_was_measured(cell: GuardedCell) -> None:
    """Between proposal and answer another job has got the free cores."""
    cell.runs("a", cores=4)
    for _ in range(SETTLES):
        cell.passes()
        cell.sends("n1", A, step_ms=100.0)
    proposal = cell.guard.next(cell.state, cell.now_ms)
    assert isinstance(proposal, CoresProposed)
    assert proposal.cores == 8
    cell.runs("b", gpus=0, cores=20)
    cell.feed(proposal)
    cell.acts()
    assert cell.cores(A) == 4
    assert "refused" in settled(cell).reason


@pytest.mark.parametrize(
    ("users_cores", "best", "settles"),
    [
        ("at_least", 8, 8),
        ("at_least", 2, 4),
        ("respect", 8, 4),
        ("respect", 2, 4),
        ("override", 8, 8),
        ("override", 2, 2),
    ],
)
def test_cores_that_a_user_named_are_the_fewest(users_cores: UsersCores, best: int, settles: int) -> None:
    """A user named four cores. More come where they make the training faster, fewer are never tried; CODA
    tries those, too, and a setting leaves them as they are."""
    cell = GuardedCell(Contention(users_cores=users_cores))
    cell.join(node())
    spec = replace(job_spec(), resources=ResourceRequest(cores=4))
    cell.submit("a", spec, estimate(cores=4))
    cell.start("a")
    cell.trains(A, up_to(best))
    assert cell.cores(A) == settles
    tried = {one.cores for one in cell.proposals if isinstance(one, CoresProposed)}
    if users_cores != "override":
        assert all(cores >= 4 for cores in tried)
    assert bool(tried) == (users_cores != "respect")


def test_an_operators_word_ends_it(cell: GuardedCell) -> None:
    """While it probes, an operator gives the job six cores: these it keeps."""
    cell.runs("a", cores=4)
    cell.trains(A, up_to(12), windows=SETTLES)
    cell.feed(
        CoresProposed(proposal_id="op", proposer="gateway", task_id=A, cores=6, reason="mine", by="ada")
    )
    cell.obey()
    cell.trains(A, up_to(12), windows=20)
    assert cell.cores(A) == 6
    assert [one.cause for one in cell.proposals] == ["probe"]


def test_a_job_on_several_nodes_is_tried_with_two_cores_per_worker(cell: GuardedCell) -> None:
    """The network holds it back: two cores are enough, unless its speed shows that they are not (CODA
    §IV-B2)."""
    for keeps, cores in ((True, 2), (False, 6)):
        cell = GuardedCell()
        cell.join(node("n1", cores=8, gpus=1), node("n2", cores=8, gpus=1))
        cell.submit("a", job_spec(workers=2), estimate(1, cores=6))
        cell.start("a")
        assert {task.place.node_id for task in cell.job("a").tasks.values()} == {"n1", "n2"}
        cell.trains(A, lambda cores, keeps=keeps: 100.0 if keeps or cores > 2 else 150.0, windows=40)
        assert [cell.cores(f"a.1.w{rank}") for rank in (0, 1)] == [cores, cores]
        assert {one.cause for one in cell.proposals} == {"probe", "settled"}


def test_a_restart_in_a_search_gives_back_what_the_placement_had(cell: GuardedCell) -> None:
    """The guard is killed in a probe. The next one knows nothing of what was measured."""
    cell.runs("a", cores=4)
    cell.trains(A, up_to(12), windows=SETTLES)
    assert cell.cores(A) == 8
    cell.guard = ContentionGuard()
    cell.acts()
    assert cell.cores(A) == 4
    assert "interrupted" in settled(cell).reason
    cell.guard = ContentionGuard()
    cell.trains(A, up_to(12), windows=20)
    assert cell.cores(A) == 4, "once per attempt"


def test_a_restart_after_a_loss_of_records_gives_back_what_the_placement_had() -> None:
    """The ledger was restored while the training was tried with one core, and the guard begins anew: that its
    node gets the order again makes the cores no operator's."""
    cell = GuardedCell()
    cell.join(node(cores=2))
    cell.runs("a", cores=2)
    cell.trains(A, up_to(1), windows=SETTLES)
    assert (cell.cores(A), cell.job("a").tasks[A].cores.trial) == (1, (0,))
    evolve(cell.state, LedgerAccepted(epoch=1, nodes_offset=0, reason="restored from a copy"))
    cell.guard = ContentionGuard()
    cell.acts()
    assert cell.cores(A) == 2
    assert "interrupted" in settled(cell).reason


def test_a_restart_searches_for_nothing_that_was_found(cell: GuardedCell) -> None:
    cell.runs("a", cores=4)
    cell.trains(A, up_to(12))
    found, sent = cell.cores(A), len(cell.proposals)
    cell.guard = ContentionGuard()
    cell.trains(A, up_to(12), windows=20)
    assert (cell.cores(A), len(cell.proposals)) == (found, sent)


def test_a_cancelled_job_is_forgotten(cell: GuardedCell) -> None:
    cell.runs("a")
    cell.trains(A, up_to(12), windows=SETTLES)
    assert cell.guard._searches
    cell.feed(JobCancelRequested(job_id="a"))
    assert not cell.guard._searches
    assert cell.acts() == []
    cell.exit(A, 1)
    assert cell.guard.due_ms(cell.state) is None or cell.acts() == []


def test_a_job_that_ends_before_its_cores_would_be_found_is_left_alone(cell: GuardedCell) -> None:
    """A minute of steps of a second: each of four probes takes nine seconds and more. One of an hour has time
    for them, and so has one of which that is not known."""
    for run_ms, proposes in ((30_000, False), (3_600_000, True), (None, True)):
        cell = GuardedCell()
        cell.join(node())
        cell.submit("a", need=replace(estimate(cores=3), run_ms=run_ms))
        cell.start("a")
        cell.trains(A, lambda cores: 10 * up_to(12)(cores), windows=20)
        assert bool(cell.proposals) == proposes


def test_a_search_ends_where_others_come_to_take_turns_on_its_gpus(cell: GuardedCell) -> None:
    """The batcher groups the job while it is tried with eight cores: its steps now depend on when the other
    one computes, so it gets back what it was placed with. Beside the group a job without GPUs is not slowed
    for what the turns cost."""
    cell.runs("a", cores=4)
    hog = cell.runs("hog", gpus=0, cores=4)
    cell.trains(A, up_to(12), windows=SETTLES)
    assert cell.cores(A) == 8
    cell.runs("rest", gpus=3)
    cell.submit("b", need=estimate(cores=4))
    jobs = tuple(ProposedJob(job_id=job_id, nodes=("n1",)) for job_id in ("a", "b"))
    unit = ProposedUnit(jobs=jobs, kind="group", explanation="they take turns")
    cell.feed(PlanProposed(proposal_id="p", proposer="batcher", units=(unit,)))
    assert cell.job("a").sharing.group
    cell.start("b")
    cell.trains(A, lambda _: 300.0, windows=10)
    assert cell.cores(A) == 4
    assert "turns" in settled(cell).reason
    cell.sends("n1", A, step_ms=600.0, cpu_stalled_percent=90.0)
    cell.trains(A, lambda _: 600.0, windows=20)
    assert cell.cores(hog) == 4


def test_a_lost_proposal_is_sent_again(cell: GuardedCell) -> None:
    """It never reached the placer."""
    cell.runs("a")
    for _ in range(SETTLES):
        cell.passes()
        cell.sends("n1", A, step_ms=100.0)
    first = cell.guard.next(cell.state, cell.now_ms)
    assert first is not None
    assert cell.guard.next(cell.state, cell.now_ms) is None
    due_ms = cell.guard.due_ms(cell.state)
    assert due_ms is not None
    assert due_ms > cell.now_ms
    cell.passes(due_ms - cell.now_ms)
    again = cell.guard.next(cell.state, cell.now_ms)
    assert isinstance(again, CoresProposed)
    assert again.cores == 8


class TestBounds:
    """The placer counts: a guard that errs, or telemetry that misleads it, costs a job no more than these."""

    def ask(self, cell: GuardedCell, cores: int, cause: str, number: int, by: str = "") -> str:
        proposal = CoresProposed(
            proposal_id=f"p{number}", proposer="other", task_id=A, cores=cores, reason="x", cause=cause, by=by
        )  # type: ignore[arg-type]
        return self.answer(cell, proposal)

    def cap(self, cell: GuardedCell, percent: int | None, cause: str, number: int, by: str = "") -> str:
        about: dict[str, Any] = {
            "proposal_id": f"c{number}",
            "proposer": "other",
            "task_id": A,
            "reason": "x",
            "by": by,
            "cause": cause,
        }
        return self.answer(cell, ThrottleProposed(**about, memory_bandwidth_percent=percent))

    def answer(self, cell: GuardedCell, proposal: CoresProposed | ThrottleProposed) -> str:
        answer = cell.feed(proposal).facts[-1]
        return f"{answer.verdict} {answer.detail}"  # type: ignore[attr-defined]

    def test_four_probes_and_one_end(self, cell: GuardedCell) -> None:
        cell.runs("a", cores=4)
        for number in range(MAX_CORE_PROBES):
            assert self.ask(cell, 5 + number, "probe", number) == "accepted "
        assert "no more than 4" in self.ask(cell, 3, "probe", 90)
        assert self.ask(cell, 6, "settled", 91) == "accepted "
        assert "once per attempt" in self.ask(cell, 5, "settled", 92)
        assert "once per attempt" in self.ask(cell, 5, "probe", 93)
        assert len(cell.job("a").tasks[A].place.cores) == 6

    def test_changes_without_a_cause_are_counted_too(self, cell: GuardedCell) -> None:
        cell.runs("a", cores=4)
        for number in range(MAX_CORE_CHANGES):
            assert self.ask(cell, 5 + number % 2, "", number) == "accepted "
        assert "no more are allowed" in self.ask(cell, 5, "", 90)
        assert self.ask(cell, 4, "", 99) == "accepted ", "what it was placed with it can always have"
        operator = CoresProposed(
            proposal_id="op", proposer="gateway", task_id=A, cores=9, reason="x", by="ada"
        )
        assert isinstance(cell.feed(operator).facts[1], CoresDecided)

    def test_a_probe_of_fewer_holds_what_it_does_not_use(self, cell: GuardedCell) -> None:
        cell.runs("a", cores=4)
        self.ask(cell, 2, "probe", 1)
        task = cell.job("a").tasks[A]
        assert (task.used_cores, task.place.cores) == ((0, 1), (0, 1, 2, 3))
        [order] = [order for order in cell.orders() if isinstance(order, SetCores)]
        assert order.cores == (0, 1)
        assert cell.state.nodes["n1"].free_core_mask.bit_count() == 20
        self.ask(cell, 2, "settled", 2)
        assert cell.job("a").tasks[A].place.cores == (0, 1)
        assert cell.state.nodes["n1"].free_core_mask.bit_count() == 22

    def test_no_service_slows_a_training(self) -> None:
        """A service sends nonsense: caps and single cores for a training, with whatever cause. An operator
        may."""
        cell = GuardedCell()
        cell.join(node(caps="resctrl"))
        cell.runs("a", cores=4)
        for number, cause in enumerate(get_args(AdjustmentCause)):
            assert "which has GPUs" in self.cap(cell, 1, cause, number)
            if cause not in ("probe", "settled"):
                assert self.ask(cell, 1, cause, 20 + number).startswith("refused")
        assert cell.cores(A) == len(cell.job("a").tasks[A].place.cores) == 4
        assert self.cap(cell, 30, "", 40, by="ada") == "accepted "
        assert self.cap(cell, None, "released", 41) == "accepted "
        assert self.ask(cell, 1, "", 42, by="ada") == "accepted "

    def test_a_search_that_measured_nothing_gives_up_no_cores(self, cell: GuardedCell) -> None:
        """The end of a search takes cores only where the attempt was tried with fewer."""
        cell.runs("a", cores=4)
        assert "which has GPUs" in self.ask(cell, 1, "settled", 1)
        assert self.ask(cell, 1, "probe", 2) == "accepted "
        assert self.ask(cell, 2, "settled", 3) == "accepted "
        assert "which has GPUs" in self.ask(cell, 1, "other", 4)
        assert self.ask(cell, 4, "other", 5) == "accepted "

    @pytest.mark.parametrize("cause", ["probe", "settled"])
    @pytest.mark.parametrize(
        ("contention", "fewest"),
        [
            (Contention(), 4),
            (Contention(users_cores="at_least"), 4),
            (Contention(users_cores="override"), 2),
            (Contention(users_cores="override", search="none"), 4),
            (None, 4),
        ],
    )
    def test_a_search_stays_within_the_settings(
        self, contention: Contention | None, fewest: int, cause: str
    ) -> None:
        """A user named four cores for two GPUs. Only where a setting allows it a service tries fewer, one per
        GPU at least."""
        cell = GuardedCell(contention)
        cell.join(node())
        spec = replace(job_spec(), resources=ResourceRequest(cores=4))
        cell.submit("a", spec, estimate(2, cores=4))
        cell.start("a")
        self.ask(cell, 4, "probe", 0)
        self.ask(cell, fewest, "probe", 1)
        assert "which has GPUs" in self.ask(cell, fewest - 1, cause, 2)
        assert self.ask(cell, fewest, cause, 3) == "accepted "
