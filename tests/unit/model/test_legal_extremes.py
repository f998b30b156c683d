"""Numbers at the ends of their legal ranges: every reader reads what follows from them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.ledger_events import ChoiceFailed, TermStarted, TimerSet, TimerSubject
from penstock.model.decisions.plans import MAX_UNITS, PlanAdopted, PlanUnit, UnitRef, Waiting
from penstock.model.inputs.external_events import JobProgress, NodeJoined, TaskPhaseChanged, WorkProgressed
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_MS, ShapeOption, within_ms
from penstock.model.schema.errors import Invalid
from penstock.model.schema.event import Event, wire_type
from penstock.model.wire.codec import decode_fact, encode, prove_readable
from penstock_services.placer.core.plans.proposals import adopt
from penstock_services.placer.core.recorder import Recorder
from tests.support.cluster.driver import CellDriver, estimate, eta, job_spec, kinds, node_spec

ENDING = timer_id("cell", "ending")


def trains(**spec: Any) -> CellDriver:
    """A cell under its default profile in which `long` takes all GPUs."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 4))
    need = msgspec.structs.replace(estimate(4), **spec)
    cell.submit("long", msgspec.structs.replace(job_spec(), model="m"), need)
    cell.start("long")
    return cell


def early(cell: CellDriver) -> list[str]:
    """A job that may launch before its GPUs are free."""
    spec = msgspec.structs.replace(job_spec(), model="m", prelaunch=True)
    return kinds(cell.submit("waits", spec, msgspec.structs.replace(estimate(4), launch_ms=1_000)))


def test_a_training_of_a_quarter_of_a_million_years_ends_at_the_end_of_time() -> None:
    """`iterations: 9007199254740992` times a step of one millisecond; the next job may launch early."""
    cell = trains(run_ms=MAX_MS, launch_ms=1_000)
    assert "timer.set" in early(cell)
    assert cell.state.timers[ENDING].at_ms == MAX_MS


def test_a_remaining_time_without_bound_does_the_same() -> None:
    """The estimator, or whoever may speak for it, says 1e18 ms."""
    cell = trains()
    job = cell.job("long")
    cell.now_ms += 5_000
    cell.feed(
        TaskPhaseChanged(node_id="n1", task_id="long.1.w0", token=job.token, phase="train", at_ms=cell.now_ms)
    )
    early(cell)
    cell.feed(eta("long", cell.now_ms, 1e18))
    assert cell.state.timers[ENDING].at_ms == MAX_MS


def test_nodes_are_kept_until_the_end_of_time_for_a_job_that_was_passed_too_often() -> None:
    """A large job waits behind one that reports a huge remaining time, while small ones pass it for days."""
    cell = trains()
    cell.join(node_spec("n2", 1))
    left = JobProgress(job_id="long", attained_s=1.0, remaining_s=1e15)
    cell.feed(WorkProgressed(node_id="n1", jobs=(left,)))
    cell.submit("waits", None, estimate(4))
    for hour in range(1, 60):
        cell.at(hour * 3_600_000)
        cell.submit(f"small{hour}", None, estimate(1))
        cell.start(f"small{hour}")
        cell.exit(f"small{hour}.1.w0")
    assert cell.state.planned["waits"].expected_ms == MAX_MS


def test_a_plan_of_the_largest_size_leaves_room_for_the_profiles_own() -> None:
    """A batch service fills its plan while the profile keeps a node; the last units are given up whole."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.state.planned = {"reserved": PlanUnit(job_id="reserved", nodes=("n1",), expected_ms=5)}
    waiting = [
        PlanUnit(
            job_id=f"j{number}",
            nodes=("n1",),
            proposed=Waiting(
                of=UnitRef(proposer="batcher", proposal_id="p", unit=number // 2),
                jobs=2,
            ),
        )
        for number in range(MAX_UNITS)
    ]
    [plan] = adopt(cell.state, waiting)
    assert [unit.job_id for unit in plan.units] == [f"j{number}" for number in range(510)] + ["reserved"]
    assert decode_fact(wire_type(PlanAdopted), encode(plan)) == plan


def test_what_no_reader_could_decode_costs_the_choice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of tomorrow computes a time beyond all bounds. Its record would end every reader."""
    values: list[bytes] = []
    cell = Recorder(values.append, stops_at_bugs=False)
    cell.record(TermStarted(term=1, placer_id="p1", settings=PlacerSettings()), 1_000)
    decide = type(cell.core.decider).decide

    def too_late(self: Any, state: Any, event: Event, *rest: Any) -> Iterator[Event]:
        yield from decide(self, state, event, *rest)
        yield TimerSet(
            timer_id="cell:ending",
            at_ms=MAX_MS + 1,
            about=TimerSubject(kind="ending", id="cell", attempt=0),
        )

    monkeypatch.setattr(type(cell.core.decider), "decide", too_late)
    step = cell.record(NodeJoined(node=node_spec("n1"), tasks=()), 2_000)
    assert step.outcome == "dead_lettered"
    assert "penstock.timer.set.v1 cannot be read back: at_ms" in (step.reason or "")
    assert any(isinstance(fact, ChoiceFailed) for fact in step.facts)
    reader = Replica()
    for offset, value in enumerate(values):
        assert reader.take(value, offset) is not None
    assert "n1" in reader.state.nodes, "the input itself counts"
    assert ENDING not in reader.state.timers


@pytest.mark.parametrize(
    ("ms", "held"),
    [(-1.0, 0), (0.4, 0), (7.6, 8), (2.0**53, MAX_MS), (1e300, MAX_MS), (float("inf"), MAX_MS)],
)
def test_computed_times_saturate(ms: float, held: int) -> None:
    """Whatever is computed from legal numbers is a legal number."""
    assert within_ms(ms) == held
    prove_readable(
        TimerSet(
            timer_id="cell:ending",
            at_ms=within_ms(ms),
            about=TimerSubject(kind="ending", id="cell", attempt=0),
        )
    )


def test_a_writer_is_told_which_field_readers_refuse() -> None:
    """The message stands in the ledger as the reason of a lost choice."""
    with pytest.raises(
        Invalid, match=r"penstock\.plan\.adopted\.v1 cannot be read back: units\.0\.expected_ms"
    ):
        prove_readable(PlanAdopted(units=(PlanUnit(job_id="a", nodes=("n1",), expected_ms=MAX_MS + 1),)))


def test_a_timer_of_a_newer_version_is_kept_and_does_nothing() -> None:
    """A placer goes back by a version: its ledger has a timer of a kind that it does not know, and that comes
    due."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    unknown = TimerSet(
        timer_id="cell:tomorrow", at_ms=cell.now_ms + 5_000, about=TimerSubject(kind="tomorrow", id="cell")
    )
    cell.feed(unknown)
    assert "cell:tomorrow" in cell.follower.state.timers
    [fired] = cell.at(10_000)
    assert kinds(fired) == ["timer.fired"]
    assert not cell.state.timers


@pytest.mark.parametrize("profile", ["penstock", "genie"])
@pytest.mark.parametrize(("step_ms", "high_ms"), [(5e-324, 1e11), (1e11, 5e-324)])
def test_an_option_that_takes_no_time_stops_nobody(profile: str, step_ms: float, high_ms: float) -> None:
    """A moldable job with a deadline reports steps of 5e-324 ms; the order of the queue rests on them."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(*(node_spec(f"n{number}", 4) for number in range(4)))
    options = tuple(
        ShapeOption(workers=n, nodes=1, gpus_per_node=n, step_ms=step_ms, low_ms=1e11, high_ms=high_ms)
        for n in (1, 2)
    )
    spec = msgspec.structs.replace(
        job_spec(workers=2), min_workers=1, global_batch_size=64, deadline_ms=60_000, iterations=10
    )
    cell.submit("tiny", spec, msgspec.structs.replace(estimate(1), run_ms=600_000, options=options))
    cell.submit("usual")
    assert {cell.job(job_id).status for job_id in ("tiny", "usual")} == {"launching"}
