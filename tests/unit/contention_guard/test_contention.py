"""Stories of the contention eliminator: who is slowed beside a training that falls behind, how far, and when
that ends."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ledger.fold.evolve import evolve
from penstock.model.decisions.adjustments import MAX_CORE_CHANGES, MAX_THROTTLES
from penstock.model.decisions.ledger_events import LedgerAccepted
from penstock.model.nouns.nodes import BandwidthCap
from penstock.model.nouns.settings import Contention
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.scheduling.acting.eliminator import CAPS, calm_after_ms, left
from penstock_services.contention_guard.core.guard import ContentionGuard
from tests.support.cluster.guarded_cell import GuardedCell, node

A, HOG = "a.1.w0", "hog.1.w0"
ONLY = Contention(search="none")


@pytest.fixture
def cell() -> GuardedCell:
    """A training beside a job without GPUs that has 16 cores; bandwidth can be capped."""
    return contended(caps="resctrl")


@pytest.fixture
def plain() -> GuardedCell:
    """The same on a node without resctrl."""
    return contended(caps="none")


def beside(*, caps: BandwidthCap = "none", contention: Contention = ONLY) -> GuardedCell:
    """No speed was reported yet."""
    found = GuardedCell(contention)
    found.join(node(caps=caps))
    found.runs("a", cores=4)
    found.runs("hog", gpus=0, cores=16)
    return found


def contended(*, caps: BandwidthCap, contention: Contention = ONLY) -> GuardedCell:
    found = beside(caps=caps, contention=contention)
    for _ in range(5):
        window(found, step_ms=100.0, pressure=20.0)
    assert found.proposals == []
    return found


def window(
    cell: GuardedCell, *, step_ms: float | None = None, pressure: float | None = None
) -> Sequence[CoresProposed | ThrottleProposed]:
    """Two seconds pass, then the node sends what it has measured. `pressure`: of bandwidth, or of stalls
    where there are no counters."""
    cell.passes()
    if pressure is not None and cell.state.nodes["n1"].spec.bandwidth_cap == "resctrl":
        cell.sends("n1", memory_bandwidth_percent=pressure)
    elif pressure is not None and "a" in cell.state.jobs:
        cell.sends("n1", A, cpu_stalled_percent=pressure / 10)
    if step_ms is not None:
        cell.sends("n1", A, step_ms=step_ms)
    return cell.acts()


def cap(cell: GuardedCell) -> int | None:
    return cell.job("hog").tasks[HOG].memory_bandwidth_percent


def test_a_cpu_job_that_slows_a_training_is_capped_step_by_step_until_that_is_over(cell: GuardedCell) -> None:
    """A stream of memory copies starts: the node's bandwidth is at 90 %, and the training's steps take half
    as long again. Each step is measured first."""
    found = window(cell, step_ms=150.0, pressure=90.0)
    assert [(one.task_id, one.cause) for one in found] == [(HOG, "contention")]
    assert "a.1.w0 has lost 33 % of its speed on n1, memory bandwidth 90 %" in found[0].reason
    assert cap(cell) == CAPS[0]
    assert window(cell, step_ms=140.0, pressure=85.0) != []
    assert cap(cell) == CAPS[1]
    assert window(cell, step_ms=103.0, pressure=70.0) == []
    assert window(cell, step_ms=103.0, pressure=70.0) == []
    assert cell.job("hog").adjustments.throttles == 2


def test_without_caps_it_loses_at_once_the_cores_that_the_training_needs(plain: GuardedCell) -> None:
    """No resctrl, no counters: the kernel reports that the training's threads wait. Its steps take 1.5 times
    as long beside 16 cores, so a tenth longer beside three."""
    window(plain, step_ms=150.0, pressure=600.0)
    assert plain.cores(HOG) == 3
    assert window(plain, step_ms=109.0, pressure=600.0) == []


def test_a_training_whose_steps_vary_is_slow_beside_the_slowest_that_it_had() -> None:
    """Its steps vary by a third, so that no speed settles before the hog comes. Steps as it had before are no
    sign of one; five times as long are."""
    cell = beside()
    for step_ms in (90.0, 120.0, 100.0):
        assert window(cell, step_ms=step_ms, pressure=20.0) == []
    assert window(cell, step_ms=125.0, pressure=600.0) == []
    assert window(cell, step_ms=600.0, pressure=600.0) != []
    assert cell.cores(HOG) == 1


def test_a_speed_that_settles_beside_a_hog_is_not_the_best_one_of_a_training_whose_steps_vary() -> None:
    """The kernel reports late that its threads wait: until then its steps are the same five times."""
    cell = beside()
    for step_ms in (90.0, 120.0, 100.0, *5 * [600.0]):
        assert window(cell, step_ms=step_ms, pressure=20.0) == []
    assert window(cell, step_ms=610.0, pressure=600.0) != []
    assert cell.cores(HOG) == 1


def test_of_two_reports_no_slowest_is_known() -> None:
    """The first steps of a job take other times than those after them."""
    cell = beside()
    for step_ms in (20.0, 50.0):
        window(cell, step_ms=step_ms, pressure=20.0)
    assert window(cell, step_ms=100.0, pressure=600.0) == []


def test_a_job_with_one_core_left_may_use_a_part_of_its_time() -> None:
    """Copies of memory slow a training from one core, too, and the processor cannot cap them. At first all 16
    cores hurt: the training needs less than one of them to go. Beside that core it loses a third of its
    speed, so a fifth of the core's time is what it can bear, and 10 % is the step below that. When it has
    ended, the job gets back the core's time and then its cores."""
    cell = contended(caps="cpu_quota")
    window(cell, step_ms=300.0, pressure=600.0)
    assert (cell.cores(HOG), cap(cell)) == (1, None)
    [found] = window(cell, step_ms=150.0, pressure=300.0)
    assert (found.task_id, found.cause) == (HOG, "contention")
    assert "a.1.w0 has lost 33 % of its speed on n1, threads wait for a core 30 % of the time" in found.reason
    assert (cell.cores(HOG), cap(cell)) == (1, 10)
    assert cell.job("hog").tasks[HOG].bandwidth_adjusted.enforced == "cpu_quota"  # type: ignore[union-attr]
    assert window(cell, step_ms=150.0, pressure=300.0) == [], "there is no lower step"
    cell.exit(A)
    assert [one.cause for one in cell.acts()] == ["released", "released"]
    assert (cell.cores(HOG), cap(cell)) == (16, None)


def test_a_core_whose_time_hurts_little_loses_half_of_it() -> None:
    cell = contended(caps="cpu_quota")
    window(cell, step_ms=300.0, pressure=600.0)
    for percent in (50, 25, 10):
        window(cell, step_ms=115.0, pressure=300.0)
        assert cap(cell) == percent
    assert window(cell, step_ms=109.0, pressure=300.0) == []


def test_the_time_of_a_core_is_given_back_before_the_other_cores() -> None:
    """The pressure is low for six seconds; the cores follow when it has been low for twelve more."""
    cell = contended(caps="cpu_quota")
    window(cell, step_ms=300.0, pressure=600.0)
    window(cell, step_ms=150.0, pressure=300.0)
    window(cell, step_ms=100.0, pressure=50.0)
    cell.passes(calm_after_ms(0))
    cell.acts()
    assert (cell.cores(HOG), cap(cell)) == (1, None)
    cell.passes(calm_after_ms(1) - 1)
    assert cell.acts() == []
    cell.passes(1)
    cell.acts()
    assert (cell.cores(HOG), cap(cell)) == (16, None)


@pytest.mark.parametrize(
    ("lost", "part"),
    [(0.1, 0.5), (0.5, 1 / 9), (0.78, 0.0313), (1.0, 0.0)],
)
def test_the_more_a_training_has_lost_the_less_others_keep(lost: float, part: float) -> None:
    """Beside n cores a step takes 1 + k·n as long as alone: k from the loss, then the n with which it loses a
    tenth."""
    assert left(lost) == pytest.approx(part, rel=0.01)


def test_without_caps_coda_halves_its_cores() -> None:
    """Each step is measured before the next. Source: CODA §V-D."""
    plain = contended(caps="none", contention=Contention(search="none", throttle="half"))
    window(plain, step_ms=200.0, pressure=600.0)
    assert plain.cores(HOG) == 8
    window(plain, step_ms=200.0, pressure=600.0)
    assert plain.cores(HOG) == 4
    for _ in range(4):
        window(plain, step_ms=200.0, pressure=600.0)
    assert plain.cores(HOG) == 1
    assert plain.cores(A) == 4


def test_what_was_measured_before_a_step_asks_for_no_second_one(plain: GuardedCell) -> None:
    """The placer's answer comes before the node's: the steps that the guard knows are of all 16 cores."""
    plain.obeys = False
    [first] = window(plain, step_ms=115.0, pressure=600.0)
    assert isinstance(first, CoresProposed)
    assert first.cores == 8
    plain.obey()
    assert plain.acts() == []
    [second] = window(plain, step_ms=113.0, pressure=600.0)
    assert isinstance(second, CoresProposed)
    assert second.cores == 4


@pytest.mark.parametrize(("step_ms", "pressure"), [(150.0, 74.0), (105.0, 99.0), (None, 99.0)])
def test_neither_pressure_alone_nor_a_slow_training_alone_slows_anybody(
    cell: GuardedCell, step_ms: float | None, pressure: float
) -> None:
    """A training that is slow for another reason; a node that is busy and hurts no job; a training that
    reports no steps."""
    for _ in range(5):
        assert window(cell, step_ms=step_ms, pressure=pressure) == []


def test_trainings_are_never_slowed() -> None:
    """Two trainings on a node take each other's bandwidth."""
    cell = GuardedCell(ONLY)
    cell.join(node(caps="resctrl"))
    cell.runs("a")
    cell.runs("b")
    for step_ms in (*[100.0] * 5, 200.0, 200.0):
        window(cell, step_ms=step_ms, pressure=95.0)
    assert cell.proposals == []
    throttle = ThrottleProposed(
        proposal_id="x",
        proposer="other",
        task_id=A,
        memory_bandwidth_percent=10,
        reason="x",
        cause="contention",
    )
    assert "has GPUs" in cell.feed(throttle).facts[-1].detail  # type: ignore[attr-defined]


def test_it_is_let_go_at_once_when_the_training_has_ended(plain: GuardedCell) -> None:
    """In one step, with all that it had."""
    for _ in range(3):
        window(plain, step_ms=200.0, pressure=600.0)
    assert plain.cores(HOG) == 1
    plain.exit(A)
    assert [one.cause for one in plain.acts()] == ["released"]
    assert plain.cores(HOG) == 16
    assert plain.guard.due_ms(plain.state) is None or plain.acts() == []


def test_it_is_let_go_when_nothing_has_been_short_for_a_while(cell: GuardedCell) -> None:
    """Hysteresis: below 60 % for six seconds, not below 75 % for a moment."""
    window(cell, step_ms=150.0, pressure=90.0)
    assert cap(cell) == 50
    for _ in range(5):
        assert window(cell, step_ms=100.0, pressure=70.0) == []
    assert window(cell, step_ms=100.0, pressure=55.0) == []
    due_ms = cell.guard.due_ms(cell.state)
    assert due_ms is not None
    cell.passes(calm_after_ms(0))
    found = cell.acts()
    assert [(one.cause, one.memory_bandwidth_percent) for one in found] == [("released", None)]
    assert "memory bandwidth 55 %" in found[0].reason


def test_each_time_it_is_let_go_later_and_in_the_end_not_before_the_training_ends(cell: GuardedCell) -> None:
    """A job that harms whenever it may: the guard lets it go less and less often, and never throttles it more
    often than is allowed."""
    waits = []
    for _ in range(400):
        if cap(cell) is None:
            window(cell, step_ms=150.0, pressure=90.0)
            began_ms = cell.now_ms
        else:
            window(cell, step_ms=100.0, pressure=30.0)
            if cap(cell) is None:
                waits.append(cell.now_ms - began_ms)
    assert waits == sorted(waits)
    assert waits[1] >= calm_after_ms(1)
    assert cell.job("hog").adjustments.throttles <= MAX_THROTTLES
    assert cap(cell) is not None
    cell.exit(A)
    cell.acts()
    assert cap(cell) is None


def test_what_others_have_got_meanwhile_it_gets_back_when_that_is_free(plain: GuardedCell) -> None:
    """The cores that it gave up started another job: it gets what is free now, and the rest when that has
    ended."""
    window(plain, step_ms=200.0, pressure=600.0)
    window(plain, step_ms=200.0, pressure=600.0)
    plain.runs("c", gpus=0, cores=10)
    plain.exit(A)
    plain.acts()
    assert plain.cores(HOG) == 14
    plain.exit("c.1.w0")
    plain.acts()
    assert plain.cores(HOG) == 16
    assert plain.job("hog").tasks[HOG].cores.throttled_from == 0


def test_a_restart_lets_go_whom_nobody_needs_slowed(cell: GuardedCell) -> None:
    """The guard is killed while a job is throttled, and the training ends meanwhile."""
    window(cell, step_ms=150.0, pressure=90.0)
    assert cap(cell) == 50
    cell.guard = ContentionGuard()
    assert cell.acts() == [], "a training still runs, and nothing is known of the node"
    cell.exit(A)
    cell.guard = ContentionGuard()
    cell.acts()
    assert cap(cell) is None


def operator(cell: GuardedCell, *, cores: int = 0, percent: int | None = None) -> None:
    """Ada sets the other job's cores, else its cap."""
    about: dict[str, Any] = {
        "proposal_id": f"op{cell.now_ms}",
        "proposer": "gateway",
        "task_id": HOG,
        "reason": "mine",
        "by": "ada",
    }
    cell.feed(
        CoresProposed(**about, cores=cores)
        if cores
        else ThrottleProposed(**about, memory_bandwidth_percent=percent)
    )
    cell.obey()


def test_cores_that_an_operator_has_set_stay(plain: GuardedCell) -> None:
    """Ada gives the preprocessing job twelve cores, though it slows a training: they are hers. Before that,
    they were the guard's to take and to return."""
    window(plain, step_ms=150.0, pressure=600.0)
    assert plain.cores(HOG) == 3
    operator(plain, cores=12)
    for _ in range(3):
        assert window(plain, step_ms=150.0, pressure=600.0) == []
    plain.exit(A)
    assert plain.acts() == []
    assert plain.cores(HOG) == 12


def test_a_cap_that_an_operator_has_set_stays(cell: GuardedCell) -> None:
    """Ada caps the job at 30 %: it is neither lowered while a training is slow, nor lifted when none runs any
    more."""
    operator(cell, percent=30)
    for _ in range(3):
        assert window(cell, step_ms=150.0, pressure=90.0) == []
    cell.exit(A)
    assert cell.acts() == []
    assert cap(cell) == 30


def test_a_cap_that_an_operator_has_lifted_is_not_set_again(cell: GuardedCell) -> None:
    """The guard has capped the job, and Ada needs its result today."""
    window(cell, step_ms=150.0, pressure=90.0)
    assert cap(cell) == 50
    operator(cell)
    for _ in range(3):
        assert window(cell, step_ms=150.0, pressure=90.0) == []
    assert cap(cell) is None


def test_the_guards_own_cap_is_lifted_beside_an_operators_cores(cell: GuardedCell) -> None:
    """Ada sets the cores of a job that the guard has capped: no lower cap follows, and that one is lifted
    when the training has ended."""
    window(cell, step_ms=150.0, pressure=90.0)
    operator(cell, cores=12)
    assert window(cell, step_ms=150.0, pressure=90.0) == []
    cell.exit(A)
    cell.acts()
    assert (cap(cell), cell.cores(HOG)) == (None, 12)


def test_after_a_loss_of_records_a_slowed_job_is_released_all_the_same(plain: GuardedCell) -> None:
    """Every task gets again what the restored ledger gives it, which is no operator's decision."""
    window(plain, step_ms=150.0, pressure=600.0)
    evolve(plain.state, LedgerAccepted(epoch=1, nodes_offset=0, reason="restored from a copy"))
    plain.obey()
    plain.exit(A)
    plain.acts()
    assert plain.cores(HOG) == 16


def test_a_job_with_little_traffic_is_not_the_cause(cell: GuardedCell) -> None:
    cell.sends("n1", HOG, memory_bandwidth_percent=3.0)
    for _ in range(3):
        assert window(cell, step_ms=150.0, pressure=90.0) == []


def test_nodes_without_counters_and_pressure_are_left_alone(plain: GuardedCell) -> None:
    """A container without pressure files and resctrl: a slow training has other reasons then."""
    cell = GuardedCell(ONLY)
    cell.join(node())
    cell.runs("a")
    cell.runs("hog", gpus=0)
    for step_ms in (*[100.0] * 5, 300.0, 300.0):
        assert window(cell, step_ms=step_ms) == []


def test_under_a_profile_without_a_guard_nothing_is_done() -> None:
    cell = GuardedCell(None)
    cell.join(node())
    cell.runs("a")
    cell.sends("n1", A, step_ms=100.0, cpu_stalled_percent=100.0)
    assert cell.acts() == []
    assert cell.guard.due_ms(cell.state) is None


STEPS_OF_DAYS_MS = 10_000_000_000
"""Steps of up to eleven days are sampled: so long a speed may take to settle
(`penstock.scheduling.acting.settling`)."""
SAMPLES = st.lists(
    st.tuples(
        st.sampled_from(["a.1.w0", "b.1.w0", "hog.1.w0", "ghost.1.w0", None]),
        st.none() | st.floats(0.001, 1e9),
        st.none() | st.floats(0, 100),
        st.none() | st.floats(0, 100),
        st.none() | st.floats(0, 1e6),
        st.integers(0, 40_000),
        st.booleans(),
    ),
    max_size=60,
)


@given(SAMPLES, st.sampled_from(["resctrl", "cpu_quota", "none"]), st.sampled_from(["walk", "doubling"]))
@settings(max_examples=60, deadline=None)
def test_whatever_the_telemetry_changes_of_a_job_are_bounded(
    samples: list, caps: BandwidthCap, search: str
) -> None:
    """Numbers at random from trainings, others and tasks that never were, a guard that is restarted at
    random: the bounds hold, the books balance, and a training is never slowed."""
    cell = GuardedCell(Contention(search=search))  # type: ignore[arg-type]
    cell.join(node(caps=caps))
    cell.runs("a", cores=3)
    cell.runs("b", gpus=2, cores=4)
    cell.runs("hog", gpus=0, cores=8)
    for task_id, step_ms, used, stalled, bandwidth, ms, restart in samples:
        cell.passes(ms)
        cell.sends(
            "n1",
            task_id,
            step_ms=step_ms,
            gpu_utilisation_percent=used,
            cpu_stalled_percent=stalled,
            memory_bandwidth_percent=bandwidth,
        )
        if restart and ms % 7 == 0:
            cell.guard = ContentionGuard()
        cell.acts()
    for name in ("a", "b", "hog"):
        job = cell.job(name)
        assert job.adjustments.core_changes <= MAX_CORE_CHANGES
        assert job.adjustments.throttles <= MAX_THROTTLES
    for one in cell.proposals:
        assert one.cause != "contention" or one.task_id == HOG
    for _ in range(20):
        cell.passes(STEPS_OF_DAYS_MS)
        cell.acts()
    sent = len(cell.proposals)
    for _ in range(20):
        cell.passes(STEPS_OF_DAYS_MS)
        cell.acts()
    assert len(cell.proposals) == sent, "idle it sends nothing"
