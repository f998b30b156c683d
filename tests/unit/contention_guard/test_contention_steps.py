"""Stories of nodes with several jobs without GPUs: each step of the contention eliminator is one for all of
them, whenever its proposals are answered."""

from collections.abc import Sequence

import pytest

from penstock.model.nouns.nodes import BandwidthCap
from penstock.model.nouns.settings import Contention
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.scheduling.acting.eliminator import CAPS, calm_after_ms
from penstock.scheduling.acting.telemetry_windows import CAME_BACK_MS, WINDOW_MS
from penstock_services.contention_guard.core.searches import Search
from tests.support.cluster.guarded_cell import GuardedCell, node

A = "a.1.w0"
HOGS = tuple(f"hog{n}.1.w0" for n in range(8))


@pytest.fixture(params=[False, True], ids=["answered one by one", "all sent first"])
def sends_first(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def contended(*, sends_first: bool, caps: BandwidthCap = "none", cores: int = 2) -> GuardedCell:
    """A training beside eight jobs without GPUs; it has run alone at 100 ms per step."""
    cell = GuardedCell(Contention(search="none"))
    cell.sends_first = sends_first
    cell.join(node(cores=4 + 8 * cores, caps=caps))
    cell.runs("a", cores=4)
    for task_id in HOGS:
        cell.runs(task_id.split(".")[0], gpus=0, cores=cores)
    for _ in range(5):
        window(cell, step_ms=100.0, busy=False)
    assert cell.proposals == []
    return cell


def window(cell: GuardedCell, *, step_ms: float, busy: bool) -> Sequence[CoresProposed | ThrottleProposed]:
    """Two seconds pass, then the node reports; the guard acts. `busy`: its bandwidth is short, or the
    training's threads wait for cores."""
    reports(cell, step_ms=step_ms, busy=busy)
    return cell.acts()


def reports(cell: GuardedCell, *, step_ms: float, busy: bool) -> None:
    cell.passes()
    if cell.state.nodes["n1"].spec.bandwidth_cap == "resctrl":
        cell.sends("n1", A, step_ms=step_ms)
        cell.sends("n1", memory_bandwidth_percent=90.0 if busy else 20.0)
    else:
        cell.sends("n1", A, step_ms=step_ms, cpu_stalled_percent=60.0 if busy else 2.0)


def cores(cell: GuardedCell) -> list[int]:
    return [cell.cores(task_id) for task_id in HOGS]


def caps(cell: GuardedCell) -> list[int | None]:
    return [cell.job(task_id.split(".")[0]).tasks[task_id].memory_bandwidth_percent for task_id in HOGS]


def test_all_jobs_beside_a_training_lose_cores_in_one_step(sends_first: bool) -> None:
    """Eight preprocessing jobs of two cores: whether the first proposal is answered before the second is sent
    or not, each has lost a core within one window."""
    cell = contended(sends_first=sends_first)
    found = window(cell, step_ms=300.0, busy=True)
    assert [(one.task_id, one.cause) for one in found] == [(task_id, "contention") for task_id in HOGS]
    assert cores(cell) == [1] * 8


def test_all_jobs_beside_a_training_are_capped_step_by_step(sends_first: bool) -> None:
    """All have a cap of 50 % before the next step is measured: none is at 10 % while another one was never
    slowed."""
    cell = contended(sends_first=sends_first, caps="resctrl")
    for cap in CAPS:
        assert len(window(cell, step_ms=300.0, busy=True)) == 8
        assert caps(cell) == [cap] * 8
    assert window(cell, step_ms=300.0, busy=True) == []


@pytest.mark.parametrize("mechanism", ["resctrl", "cpu_quota", "none"])
def test_all_slowed_jobs_are_released_in_one_step(sends_first: bool, mechanism: BandwidthCap) -> None:
    """The contention is over and the node goes quiet: six seconds after the last report each of the eight
    jobs has again what it had."""
    cell = contended(sends_first=sends_first, caps=mechanism)
    window(cell, step_ms=300.0, busy=True)
    assert window(cell, step_ms=100.0, busy=False) == []
    cell.passes(calm_after_ms(0) - 1)
    assert cell.acts() == []
    cell.passes(1)
    found = cell.acts()
    assert [(one.task_id, one.cause) for one in found] == [(task_id, "released") for task_id in HOGS]
    assert cores(cell) == [2] * 8
    assert caps(cell) == [None] * 8


def test_one_release_of_eight_jobs_counts_once(sends_first: bool) -> None:
    """They do it again: the next release comes after twice the time, not after 2⁸ times."""
    cell = contended(sends_first=sends_first)
    for times in range(3):
        window(cell, step_ms=300.0, busy=True)
        assert cores(cell) == [1] * 8
        window(cell, step_ms=100.0, busy=False)
        waited_ms = 0
        while cores(cell) != [2] * 8:
            cell.passes()
            cell.acts()
            waited_ms += WINDOW_MS
            assert waited_ms < 1_000_000, "they are never released"
        assert waited_ms == calm_after_ms(times)


def test_a_release_that_did_not_reach_the_placer_is_repeated_on_a_quiet_node() -> None:
    """The placer is away while eight proposals are sent, and no report comes any more: the release is sent
    again after the time of a second one."""
    cell = contended(sends_first=True)
    window(cell, step_ms=300.0, busy=True)
    window(cell, step_ms=100.0, busy=False)
    cell.passes(calm_after_ms(0))
    while cell.guard.next(cell.state, cell.now_ms) is not None:
        pass
    assert cores(cell) == [1] * 8
    cell.passes(calm_after_ms(1))
    cell.acts()
    assert cores(cell) == [2] * 8


def test_released_jobs_share_the_cores_that_are_free(sends_first: bool) -> None:
    """Another job has taken the eight cores that they lost, and the training that ends leaves four. The first
    four get theirs, no proposal is refused, and the others follow when it ends."""
    cell = contended(sends_first=sends_first)
    window(cell, step_ms=300.0, busy=True)
    cell.runs("late", gpus=0, cores=8)
    cell.exit(A)
    found = cell.acts()
    assert [one.task_id for one in found] == list(HOGS[:4])
    assert cores(cell) == [2] * 4 + [1] * 4
    cell.exit("late.1.w0")
    cell.acts()
    assert cores(cell) == [2] * 8


def test_a_step_ends_with_the_training_for_which_it_was_taken() -> None:
    """The placer has answered the first of eight proposals when the training ends: the other jobs lose
    nothing, and the first one gets its core back."""
    cell = contended(sends_first=False)
    reports(cell, step_ms=300.0, busy=True)
    first = cell.guard.next(cell.state, cell.now_ms)
    assert first is not None
    cell.feed(first)
    cell.obey()
    cell.exit(A)
    assert [(one.task_id, one.cause) for one in cell.acts()] == [(HOGS[0], "released")]
    assert cores(cell) == [2] * 8


def test_while_an_answer_is_under_way_no_next_step_begins() -> None:
    """The placer is slow: three of eight proposals are answered when the node reports again. What it reports
    is not yet the effect of the whole step."""
    cell = contended(sends_first=True, caps="resctrl")
    reports(cell, step_ms=300.0, busy=True)
    sent = []
    while (proposal := cell.guard.next(cell.state, cell.now_ms)) is not None:
        sent.append(proposal)
    for proposal in sent[:3]:
        cell.feed(proposal)
        cell.obey()
    assert window(cell, step_ms=290.0, busy=True) == []
    for proposal in sent[3:]:
        cell.feed(proposal)
        cell.obey()
    assert caps(cell) == [50] * 8
    assert cell.acts() == []
    assert len(window(cell, step_ms=290.0, busy=True)) == 8


def test_a_bug_in_a_search_costs_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search raises for one of two trainings. Its job has one attempt for each report, and the other one's
    cores are found."""
    advance = Search.advance

    def broken(search: Search, now_ms: int) -> None:
        if search.workers == (A,):
            raise ZeroDivisionError("a bug")
        advance(search, now_ms)

    monkeypatch.setattr(Search, "advance", broken)
    cell = GuardedCell()
    cell.join(node())
    cell.runs("a")
    b = cell.runs("b")
    raised, found = 0, []
    for _ in range(5):
        cell.passes()
        cell.sends("n1", A, step_ms=100.0)
        cell.sends("n1", b, step_ms=100.0)
        while (due_ms := cell.guard.due_ms(cell.state)) is not None and due_ms <= cell.now_ms:
            try:
                found.append(cell.guard.next(cell.state, cell.now_ms))
            except ZeroDivisionError:
                raised += 1
            assert raised < 100, "it spins"
    assert raised == 5
    assert [one.task_id for one in found if one is not None] == [b]


@pytest.mark.parametrize(
    ("ahead_ms", "helps_after"),
    [(3_600_000, 1), (CAME_BACK_MS + 2 * WINDOW_MS, 1), (CAME_BACK_MS + WINDOW_MS, 32), (WINDOW_MS, 1)],
)
def test_a_clock_that_was_ahead_delays_help_by_a_minute_at_most(
    sends_first: bool, ahead_ms: int, helps_after: int
) -> None:
    """The log's clock jumps ahead for one window, and is set back: a training that is slowed gets help with
    the next window, or, where windows seem late, when the clock is there again: after a minute and two
    windows at most."""
    cell = contended(sends_first=sends_first)
    cell.log_ahead_ms = ahead_ms
    window(cell, step_ms=100.0, busy=False)
    cell.log_ahead_ms = 0
    windows = 0
    while not cell.proposals:
        window(cell, step_ms=300.0, busy=True)
        windows += 1
        assert windows < 40, "it gets no help"
    assert windows == helps_after
    assert cores(cell) == [1] * 8
    window(cell, step_ms=100.0, busy=False)
    cell.passes(calm_after_ms(0))
    cell.acts()
    assert cores(cell) == [2] * 8


def test_a_search_goes_on_where_the_clock_came_back() -> None:
    """The clock is ahead when a probe begins: its reports count as soon as it is right again."""
    cell = GuardedCell()
    cell.join(node())
    cell.runs("a", cores=4)
    cell.trains(A, lambda cores: 400.0 / cores, windows=3)
    cell.log_ahead_ms = 3_600_000
    cell.trains(A, lambda cores: 400.0 / cores, windows=2)
    assert cell.cores(A) == 8
    cell.log_ahead_ms = 0
    cell.trains(A, lambda cores: 400.0 / cores, windows=6)
    assert cell.cores(A) == 16


def test_a_frozen_cell_ends_a_step() -> None:
    """The ledger has lost records in the middle of a step: the placer refuses the first proposal, and once an
    operator has accepted the loss the other jobs are slowed by a new step."""
    cell = contended(sends_first=False)
    reports(cell, step_ms=300.0, busy=True)
    first = cell.guard.next(cell.state, cell.now_ms)
    assert first is not None
    cell.state.frozen = "records are lost"
    assert cell.guard.next(cell.state, cell.now_ms) is None
    assert cell.guard.due_ms(cell.state) is None
    cell.feed(first)
    cell.state.frozen = ""
    assert [one.task_id for one in cell.acts()] == list(HOGS[1:])
