"""What the fold knows of a running job, and that it knows it within bounds."""

import dataclasses
import math
from collections.abc import Sequence

import pytest

from penstock.ledger.record.record import Draft, Head, write
from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.inputs import estimates, external_events
from penstock.model.inputs.estimates import EtaEstimated
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.fold.from_snapshot import MAX_RECALLED, recall, recall_from
from penstock_services.estimator.core.fold.progress import (
    MAX_PUBLISHED,
    MAX_SPANS,
    MAX_WINDOWS,
    LossCurve,
    Progress,
    Published,
    Windows,
    ring_of,
)
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.model_lifecycle import MAX_MISSED, Due
from penstock_services.estimator.core.records.runs import EtaAtHalf
from penstock_services.estimator.core.step_time.training import MIN_NEW, STEPS
from tests.unit.estimator.reports import Reports, ran

RECORD_MS = 1_000  # from one record to the next, as `Cell` has it


def blank(ring: tuple[int, ...] = (1,)) -> Progress:
    return Progress(1, 0, ring, "T4", {})


def line(
    done: int, steps: int = 0, step_ms: float = 0.0, loss: float | None = None, total: int | None = None
) -> StepsMeasured:
    return StepsMeasured(
        node_id="n",
        task_id="t",
        token=1,
        at_ms=1 << 52,
        done=done,
        total=total,
        steps=steps,
        step_ms=step_ms,
        loss=loss,
    )


def test_a_whole_job_shows_its_phases_steps_and_losses() -> None:
    """Four seconds to load, ten to train in two windows, a save of two: by the node's clock, which is an hour
    off."""
    cell = Reports()
    cell.begin("job", (2, 2))
    cell.phase("job", "launch")
    cell.phase("job", "train", after_ms=4_000)
    cell.report("job", 1, loss=5.0)
    cell.report("job", 21, steps=20, step_ms=100.0, total=100, loss=3.0)
    cell.report("job", 100, steps=79, step_ms=100.0, total=100, loss=2.0)
    cell.phase("job", "save")
    cell.now_ms += 2_000
    began_ms = [task.began_ms for task in cell.progress("job").tasks.values()]
    for rank, began in enumerate(began_ms):
        assert began is not None
        exited = external_events.TaskExited(
            node_id=cell.node_of(f"job/1/{rank}"),
            task_id=f"job/1/{rank}",
            token=1,
            cause="exited",
            exit_code=0,
            started_ms=began,
            exited_ms=cell.node_ms,
        )
        cell.record(exited)
    cell.record(JobEnded(job_id="job", outcome="succeeded"))
    [run] = cell.stored
    measured = run.measured
    assert (measured.total_gpus, measured.iterations) == (4, 100)
    assert measured.step_ms == pytest.approx(100)
    assert measured.launch_ms == 4_000 + 3 * RECORD_MS
    assert measured.train_ms == 9_900 + 4 * RECORD_MS
    assert measured.save_ms == 2_000 + RECORD_MS
    assert run.steps is not None
    assert run.steps.placement == (2, 2)
    assert run.steps.windows_ms == pytest.approx((100, 100))
    assert run.steps.curve == ((1, 5), (21, 3), (100, 2))


def test_a_script_that_shows_nothing_leaves_everything_unknown() -> None:
    cell = Reports()
    cell.begin("job")
    cell.end("job")
    [run] = cell.stored
    assert (run.steps, run.steps_rejected, run.eta) == (None, "", None)
    assert math.isnan(run.measured.launch_ms)
    assert math.isnan(run.measured.iterations)


def test_a_preempted_job_goes_on_from_its_checkpoint() -> None:
    """Stopped at 600, resumed from 500 on twice the GPUs: iterations and losses are the job's, step times the
    placement's."""
    cell = Reports()
    cell.begin("job", (2,))
    cell.report("job", 100, steps=99, step_ms=200.0, loss=3.0)
    cell.report("job", 600, steps=500, step_ms=200.0, loss=2.0)
    cell.record(*cell.over("job", "preempted"))
    cell.begin("job", (4,), attempt=2)
    waiting = cell.progress("job")
    assert (waiting.done, waiting.at_ms, waiting.windows.parts) == (600, 0, [])
    cell.report("job", 501, attempt=2, loss=2.2)
    cell.report("job", 700, steps=199, step_ms=110.0, attempt=2, loss=1.9)
    found = cell.progress("job")
    assert (found.done, found.odd) == (700, 0)
    assert found.windows.equal() == pytest.approx((110,))
    assert [step for step, _ in found.curve.points()] == [100, 501, 700], (
        "600 was not reached again by the checkpoint"
    )


def test_a_job_that_resumes_where_it_was_keeps_its_step_times() -> None:
    """A node's process crashed and came back on the same GPUs."""
    cell = Reports()
    cell.begin("job", (2,))
    cell.report("job", 100, steps=99, step_ms=200.0)
    cell.begin("job", (2,), attempt=2)
    assert cell.progress("job").windows.mean_ms == pytest.approx(200)


def test_iterations_that_go_back_are_counted_and_ignored() -> None:
    """A script counts within an epoch, from 1 again and again; a late copy of a telling comes twice."""
    cell = Reports()
    cell.begin("job")
    for done in (50, 100, 100, 7, 60):
        cell.report("job", done, loss=float(done))
    found = cell.progress("job")
    assert (found.done, found.odd, len(found.curve.points())) == (100, 2, 2)


@pytest.mark.parametrize(
    ("steps", "step_ms"), [(1_000_000, 1.0), (5, 1e-9), (5, 1e9), (5, 0.0), (5, math.nan), (5, math.inf)]
)
def test_windows_that_cannot_be_true_are_rejected(steps: int, step_ms: float) -> None:
    """More steps than were done, no time at all, longer than a day, no number: where the job stands is
    believed all the same."""
    found = blank()
    assert found.step(line(1), 1)
    assert found.step(line(100, steps, step_ms), 2)
    assert (found.done, found.odd, found.windows.parts) == (100, 1, [])


def test_a_window_is_no_longer_than_its_task_has_run() -> None:
    """A script takes milliseconds for seconds."""
    cell = Reports()
    cell.begin("job")
    cell.record(
        external_events.StepsMeasured(
            node_id="node-1",
            task_id="job/1/0",
            token=1,
            at_ms=cell.node_ms + 5_000,
            done=50,
            steps=49,
            step_ms=1_000.0,
        )
    )
    assert (cell.progress("job").odd, cell.progress("job").windows.parts) == (1, [])
    cell.end("job")
    assert cell.stored[0].steps is None
    assert cell.stored[0].steps_rejected.startswith("steps: 1 reports that cannot be true")
    assert not cell.stored[0].rejected, "what else the run measured is sound"


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 1e200])
def test_a_loss_that_is_no_number_is_no_point(loss: float) -> None:
    """It diverged; JSON that was read without judgement may hold it."""
    curve = LossCurve()
    curve.add(1, 2.0)
    curve.add(2, loss)
    curve.add(3, None)
    assert curve.points() == ((1, 2.0),)


def test_a_total_that_is_passed_is_none() -> None:
    """The user wrote 100 epochs into the job file and the script counts batches; or the script's own total is
    too small."""
    found = blank()
    found.step(line(60), 1)
    assert found.max_iterations(100) == 100
    assert found.max_iterations(None) is None
    found.step(line(120), 2)
    assert found.max_iterations(100) is None
    found.step(line(130, total=500), 3)
    assert found.max_iterations(100) == 500, "the script knows better"
    found.step(line(140, total=139), 4)
    assert found.max_iterations(100) is None


def test_a_million_iterations_stay_within_bounds() -> None:
    """A node that passes on 200,000 tellings of one job."""
    found = blank()
    for done in range(5, 1_000_001, 5):
        found.step(line(done, 5, 5.0, loss=1 / done), done)
    assert len(found.windows.parts) <= MAX_WINDOWS
    assert found.windows.steps == 1_000_000
    assert len(found.windows.equal()) <= MAX_WINDOWS
    assert len(found.curve.points()) < 110
    for number in range(10_000):
        found.publish(Published(number, Bounds(1, 1, 1)))
    assert len(found.published) <= MAX_PUBLISHED
    assert (found.published[0].at_ms, found.published[-1].at_ms) == (0, 9_999)


def test_the_largest_iterations_make_no_more_spans() -> None:
    curve, step = LossCurve(), 1
    while step < 1 << 53:
        curve.add(step, 1.0)
        step = max(step + 1, int(step * 1.01))
    assert len(curve.spans) < MAX_SPANS
    steps = [step for step, _ in curve.points()]
    assert steps == sorted(set(steps))


def test_windows_of_unlike_length_become_equal_ones() -> None:
    """Published at growing distances: one slow step first, then a thousand fast ones. The mean is of steps,
    not of windows."""
    windows = Windows()
    windows.add(1, 1_001.0)
    windows.add(1_000, 1.0)
    assert windows.mean_ms == pytest.approx(2.0, rel=0.01)
    assert windows.equal() == pytest.approx(((1_001 + 499.5) / 500.5, 1.0), rel=0.01)
    assert sum(windows.equal()) / 2 == pytest.approx(windows.mean_ms)


def places(*nodes: str, share: int = 1_000) -> Sequence[TaskPlacement]:
    return [
        TaskPlacement(
            task_id=f"t{rank}", role="worker", rank=rank, node_id=node, gpus=(0,), gpu_share_milli=share
        )
        for rank, node in enumerate(nodes)
    ]


def test_a_ring_is_the_gpus_on_each_node() -> None:
    assert ring_of(places("a", "b", "a", "a")) == (3, 1)
    assert ring_of(places("a", share=500)) == (), "half of a GPU: whose other half runs, nobody knows"
    assert ring_of([TaskPlacement(task_id="t", role="worker", rank=0, node_id="a")]) == ()


def test_phases_alternate_and_the_longest_worker_counts() -> None:
    """It saves every epoch; the second worker's loader is slow."""
    cell = Reports()
    cell.begin("job", (1, 1))
    for _ in range(3):
        cell.phase("job", "train", after_ms=1_000)
        cell.phase("job", "save", after_ms=10_000)
    cell.phase("job", "train", after_ms=40_000, rank=1)
    found = cell.progress("job").phases_ms()
    assert found["train"] == 3 * 11_000
    assert found["launch"] > 70_000


def test_a_clock_that_steps_back_makes_phases_unknown() -> None:
    cell = Reports()
    cell.begin("job")
    cell.phase("job", "train", after_ms=5_000)
    cell.phase("job", "save", after_ms=-60_000)
    assert all(math.isnan(spent) for spent in cell.progress("job").phases_ms().values())


def test_after_a_snapshot_only_what_is_reported_is_known() -> None:
    """The estimator restarts beside a running job: its phases began before, its place and later steps are
    known."""
    cell = Reports()
    cell.begin("job", (2, 2))
    cell.restart()
    cell.phase("job", "save", after_ms=1_000)
    cell.report("job", 700, steps=50, step_ms=100.0)
    found = cell.progress("job")
    assert (found.attempt, found.ring, found.gpu, found.done) == (1, (2, 2), "T4", 700)
    assert (cell.ledger.live["job"].info.iterations, cell.ledger.live["job"].info.target_loss) == (
        1_000,
        None,
    )
    assert math.isnan(found.phases_ms()["train"])
    assert found.windows.mean_ms == pytest.approx(100)


def test_what_was_published_before_a_snapshot_is_recalled() -> None:
    """As above, but the records since the oldest placement are read again: all is as if there had been no
    snapshot. Among them a zombie's, which says that the job is done."""
    cell = Reports()
    cell.begin("long-gone", (1,))
    cell.end("long-gone")
    before = len(cell.values)
    cell.begin("job", (2, 2))
    cell.phase("job", "train", after_ms=3_000)
    cell.report("job", 1, loss=4.0)
    cell.report("job", 101, steps=100, step_ms=90.0, loss=3.0)
    cell.record(predicted("job", cell.now_ms, 90_000.0))
    _, zombie = write(
        Head(cell.head.seq - 2, "0" * 32, 1),
        Draft(1, cell.now_ms, {"timer_id": "t"}, "committed", None, (line_of("job", 900),)),
    )
    cell.values[-1:-1] = [zombie, b"\xff no record"]
    cell.phase("job", "save", after_ms=1_000)
    known = cell.progress("job")
    offset = cell.restart()
    since = recall_from(cell.ledger, offset)
    assert before < since < len(cell.values)
    recall(cell.ledger, cell.values[since:])
    assert dataclasses.replace(cell.progress("job"), placed_ms=0) == dataclasses.replace(known, placed_ms=0)
    assert known.done == 101
    cell.report("job", 201, steps=100, step_ms=90.0)
    assert cell.ledger.void == 0


def test_not_more_is_recalled_than_bounds_allow() -> None:
    """A job of a month, in a cell of ten million records; and a cell where nothing runs."""
    ledger = State(Topic.JOBS, 0)
    assert recall_from(ledger, 500) == 500
    ledger.recall_seq = 3
    assert recall_from(ledger, 500) == 2
    assert recall_from(ledger, 10_000_000) == 10_000_000 - MAX_RECALLED


def line_of(job_id: str, done: int) -> external_events.StepsMeasured:
    return external_events.StepsMeasured(
        node_id="node-1", task_id=f"{job_id}/1/0", token=1, at_ms=1, done=done
    )


def predicted(job_id: str, at_ms: int, left_ms: float, attempt: int = 1) -> EtaEstimated:
    around = estimates.Bounds(middle=left_ms, low=0.8 * left_ms, high=1.2 * left_ms)
    return EtaEstimated(
        job_id=job_id,
        attempt=attempt,
        at_ms=at_ms,
        done=1,
        left_ms=around,
        steps=around,
        step_ms=around,
        level=0.9,
        source="s",
    )


def test_what_was_published_is_judged_at_half_of_the_run() -> None:
    """A hundred seconds; after ten of them 80 were said to be left, after 70 of them 25. At half, the first
    stood."""
    found = blank()
    found.started_ms = 1_000
    found.publish(Published(11_000, Bounds(80_000, 70_000, 95_000)))
    found.publish(Published(71_000, Bounds(25_000, 20_000, 30_000)))
    assert found.eta_at_half(101_000) == EtaAtHalf(40_000, 30_000, 55_000, 50_000)
    assert found.eta_at_half(12_000) is None, "nothing was told in the first half"
    assert blank().eta_at_half(1_000) is None


def test_only_what_was_published_of_the_last_attempt_counts() -> None:
    """A preemption is no fault of the estimate."""
    cell = Reports()
    cell.begin("job")
    cell.record(predicted("job", cell.now_ms, 10.0))
    assert len(cell.progress("job").published) == 1
    cell.begin("job", attempt=2)
    cell.record(predicted("job", cell.now_ms, 10.0, attempt=1))
    assert cell.progress("job").published == []


def test_tasks_that_nobody_knows_change_nothing() -> None:
    """A stray of an attempt long over still writes."""
    cell = Reports()
    cell.report("ghost", 5, steps=4, step_ms=10.0)
    cell.record(predicted("ghost", 1, 1.0))
    assert (cell.ledger.live, cell.ledger.stepped) == ({}, {})


def test_a_model_of_steps_is_due_by_runs_or_by_missed_intervals() -> None:
    """Runs without steps do not count; once, a driver update makes every job slower than was told."""
    due = Due(STEPS)
    due.seen([ran(seq)._replace(steps=None) for seq in range(100)])
    due.seen([ran(1)._replace(rejected="run_ms: wrong")])
    assert not due.reason
    due.seen([ran(seq) for seq in range(MIN_NEW)])
    assert due.reason.startswith(f"{MIN_NEW} new runs since")
    due.trained(1_000)
    due.seen([ran(seq)._replace(eta=EtaAtHalf(10, 9, 11, 10.5)) for seq in range(30)])
    assert not due.reason
    due.seen([ran(seq)._replace(eta=EtaAtHalf(10, 9, 11, 12)) for seq in range(MAX_MISSED)])
    assert due.reason.startswith("drift: 13 of 43 runs")
