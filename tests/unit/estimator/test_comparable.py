"""Runs that were not disturbed teach; of those that were, what is comparable all the same, or can be
corrected."""

import math

import pytest
from msgspec.structs import replace

from penstock.model.decisions.adjustments import BandwidthDecided
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    StageSample,
    StagesMeasured,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.accuracy import accuracy_of
from penstock_services.estimator.core.fold.from_snapshot import recall, recall_from
from penstock_services.estimator.core.records.conditions import Disturbance, comparable
from penstock_services.estimator.core.records.history import History, Run, key_of
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.resources.estimate import HistoryTier, estimate
from penstock_services.estimator.core.resources.nearest import believed, comparable_of_each
from penstock_services.estimator.core.step_time.training_set import sample_of
from tests.unit.estimator.disturbed_cell import USED, Disturbed
from tests.unit.estimator.reports import JOB, updates_of

SAVES = replace(JOB, checkpoint="sdk", iterations=None)
HOUR_MS = 3_600_000


def bits(run: FinishedRun) -> Disturbance:
    return Disturbance(int(run.measured.disturbed))


def test_a_preempted_job_that_went_on_at_its_checkpoint_ran_as_long_as_its_work() -> None:
    """Two hours of ten are done when it is stopped, and saved; the next attempt takes eight. It is a job of
    ten hours, not of eight, and its next run is to be estimated so. What the first attempt did after its last
    checkpoint was done twice, and is not counted."""
    cell = Disturbed()
    cell.start("job", SAVES)
    cell.after(2 * HOUR_MS, cell.saved("job"))
    cell.after(HOUR_MS // 2)
    cell.stopped("job", used=replace(USED, host_memory_mib=6_000))
    cell.start("job", attempt=2)
    run = cell.finish("job", 8 * HOUR_MS, attempt=2)
    assert run.measured.run_ms == 10 * HOUR_MS
    assert run.corrected == "checkpoints of earlier attempts"
    assert bits(run) == Disturbance(0)
    assert run.measured.host_memory_mib == 6_000, "the largest of all attempts whose work was kept"
    assert math.isnan(run.measured.launch_ms), "it launched and restored"
    assert estimate(SAVES, (HistoryTier(cell.ledger.history),)).run_ms == 10 * HOUR_MS
    assert accuracy_of(cell.stored).corrected == {"checkpoints of earlier attempts": 1}


def test_a_preempted_job_that_began_anew_ran_as_long_as_its_last_attempt() -> None:
    """It was stopped before it had saved: what it had done is lost, and no part of its run time."""
    cell = Disturbed()
    cell.start("job", SAVES)
    cell.after(HOUR_MS)
    cell.stopped("job")
    cell.start("job", attempt=2)
    run = cell.finish("job", 8 * HOUR_MS, attempt=2)
    assert (run.measured.run_ms, run.corrected, bits(run)) == (8 * HOUR_MS, "", Disturbance(0))


def test_a_checkpoint_that_the_next_attempt_does_not_find_keeps_nothing() -> None:
    """It lies on node-1's disk, and the job was moved to node-2; one in a folder that all see goes with
    it."""
    for shared, run_ms in ((False, 8 * HOUR_MS), (True, 10 * HOUR_MS)):
        cell = Disturbed()
        cell.start("job", SAVES)
        cell.after(2 * HOUR_MS, cell.saved("job", shared=shared))
        cell.stopped("job", reason="migrated")
        cell.start("job", attempt=2, node="node-2")
        assert cell.finish("job", 8 * HOUR_MS, attempt=2).measured.run_ms == run_ms


def test_a_checkpoint_that_the_node_fetched_keeps_its_work() -> None:
    """Moved to node-2, which has fetched it from node-1 before the task starts, or could not since node-1 is
    gone."""
    for problem, run_ms in (("node-1 does not answer", 8 * HOUR_MS), ("", 10 * HOUR_MS)):
        cell = Disturbed()
        cell.start("job", SAVES)
        cell.after(2 * HOUR_MS, cell.saved("job"))
        cell.stopped("job", reason="migrated")
        cell.start("job", attempt=2, node="node-2")
        cell.record(
            CheckpointFetched(
                node_id="node-2", task_id="job/2/0", token=1, at_ms=1, from_node="node-1", problem=problem
            )
        )
        assert cell.finish("job", 8 * HOUR_MS, attempt=2).measured.run_ms == run_ms


def test_a_script_that_went_on_by_itself_is_seen_by_its_iterations() -> None:
    """It saves in a place of its own, and the ledger hears of no checkpoint. Its second attempt begins after
    6,000 of its 10,000 iterations, half a second each."""
    cell = Disturbed()
    spec = replace(JOB, iterations=10_000)
    cell.start("job", spec)
    cell.report("job", 6_000, steps=5_000, step_ms=400.0)
    cell.stopped("job")
    cell.start("job", attempt=2, node="node-2", gpus=(0, 1))
    cell.report("job", 6_001, attempt=2, lasted_ms=0)
    cell.report("job", 10_000, steps=3_999, step_ms=500.0, attempt=2)
    run = cell.finish("job", 2_000_000, attempt=2)
    assert run.corrected == "iterations of earlier attempts"
    assert run.measured.run_ms == pytest.approx(2_000_000 + 6_001 * 500 - 1_000, abs=2_000)
    assert run.measured.step_ms == pytest.approx(500)


def test_who_saves_on_sigterm_keeps_what_it_had_done_when_it_was_stopped() -> None:
    """`checkpoint: signal`: the ledger hears of no checkpoint, and the next attempt goes on. When its node
    burns down, nobody knows from where."""
    for reason, run_ms, met in (
        ("preempted", 11, Disturbance(0)),
        ("node_lost", 8, Disturbance.UNKNOWN_WORK),
    ):
        cell = Disturbed()
        cell.start("job", replace(SAVES, checkpoint="signal"))
        cell.after(3 * HOUR_MS - 2_000)
        cell.stopped("job", reason=reason)
        cell.start("job", attempt=2)
        run = cell.finish("job", 8 * HOUR_MS, attempt=2)
        assert run.measured.run_ms == pytest.approx(run_ms * HOUR_MS, abs=2_000)
        assert bits(run) == met


def test_where_nobody_knows_what_was_kept_a_full_run_counts_more() -> None:
    """Neither checkpoints nor iterations: eight hours may be the job, or its end. It counts while nothing
    better is known."""
    cell = Disturbed()
    spec = replace(JOB, iterations=None)
    cell.start("job", spec)
    cell.after(HOUR_MS)
    cell.stopped("job")
    cell.start("job", attempt=2)
    assert bits(cell.finish("job", 8 * HOUR_MS, attempt=2)) == Disturbance.UNKNOWN_WORK
    assert estimate(spec, (HistoryTier(cell.ledger.history),)).run_ms == 8 * HOUR_MS
    cell.start("again", spec)
    cell.finish("again", 10 * HOUR_MS)
    assert estimate(spec, (HistoryTier(cell.ledger.history),)).run_ms == 10 * HOUR_MS


@pytest.mark.parametrize("milli", [500, 1_000])
def test_a_job_beside_another_on_its_gpu_teaches_what_it_did_alone(milli: int) -> None:
    """Half a GPU each, or both in a group on the whole one. Alone it takes 100 ms for a step, beside a
    neighbour 180; the neighbour leaves again. GPU memory is measured on the device, and has been the sum of
    both."""
    cell = Disturbed()
    cell.start("job", milli=milli)
    cell.report("job", 1)
    cell.report("job", 101, steps=100, step_ms=100.0)
    cell.start("guest", milli=milli)
    cell.report("job", 301, steps=200, step_ms=150.0)
    cell.report("job", 501, steps=200, step_ms=180.0)
    assert cell.progress("job").windows.mean_ms == pytest.approx(180)
    guest = cell.finish("guest", 60_000)
    cell.report("job", 601, steps=100, step_ms=140.0)
    cell.report("job", 1_000, steps=399, step_ms=102.0)
    run = cell.finish("job", 130_000)
    assert bits(run) == bits(guest) == Disturbance.SHARED
    assert run.measured.step_ms == pytest.approx((100 * 100 + 399 * 102) / 499), "mixed windows are nobody's"
    assert math.isnan(guest.measured.step_ms)
    assert accuracy_of(cell.stored).disturbed == {"shared a GPU": 2}
    found = accuracy_of(cell.stored).tiers
    assert all("run_ms" not in fields for fields in found.values())


def test_memory_of_the_host_is_comparable_beside_a_neighbour_and_of_the_device_is_not() -> None:
    history = History()
    key = key_of(JOB)
    shared = Run(
        1,
        1,
        run_ms=200,
        busy_cores=1,
        host_memory_mib=900,
        gpu_memory_mib=14_000,
        gpu_utilisation_percent=100,
        disturbed=float(Disturbance.SHARED),
    )
    alone = Run(
        2, 2, run_ms=100, busy_cores=2, host_memory_mib=800, gpu_memory_mib=7_000, gpu_utilisation_percent=60
    )
    history.add(key, shared)
    tier = HistoryTier(history)
    assert estimate(JOB, (tier,)).worker.gpu_memory_mib == 15_400, "better than nothing"
    history.add(key, alone)
    found = estimate(JOB, (tier,))
    assert (found.worker.gpu_memory_mib, found.worker.host_memory_mib) == (7_700, 990)
    assert (found.worker.cores, found.worker.gpu_utilisation_percent, found.run_ms) == (3, 60, 100)


def test_whose_runs_nobody_disturbed_does_not_outvote_other_owners() -> None:
    """Two owners ran beside others, the third alone and ten times as long: he is still believed up to twice
    what the next one had."""
    by_others = Run(1, 1, run_ms=100, disturbed=float(Disturbance.SHARED))
    found = comparable_of_each([("bob", by_others), ("eve", by_others), ("ada", Run(2, 2, run_ms=1_000))])
    assert believed(found, "run_ms") == 200
    own = comparable_of_each([("bob", by_others), ("bob", Run(3, 3, run_ms=60)), ("eve", by_others)])
    assert [run.run_ms for _, run in own][1:] == [60, 100]
    assert math.isnan(own[0][1].run_ms)


def test_changed_cores_are_other_conditions() -> None:
    """Four cores become one in the midst of it, by the contention-guard; a step takes three times as long
    from then on."""
    cell = Disturbed()
    cell.start("job")
    cell.report("job", 1)
    cell.report("job", 401, steps=400, step_ms=100.0)
    cell.record(cell.cores("job", 1))
    cell.report("job", 601, steps=200, step_ms=200.0)
    cell.report("job", 1_000, steps=399, step_ms=300.0)
    run = cell.finish("job", 220_000)
    assert bits(run) == Disturbance.CORES
    assert run.measured.step_ms == pytest.approx(100)
    assert run.steps is not None
    assert run.steps.windows_ms == pytest.approx((100,))
    found = sample_of(run)
    assert found is not None
    assert found.step_s == pytest.approx(0.1)


def test_cores_that_were_changed_are_not_what_the_owners_jobs_needed() -> None:
    """The contention-guard tries a training with one core, then with sixteen. What was busy then says what it
    was given: its owner's next job does not begin with it (CODA's N_start)."""
    cell = Disturbed()
    busy = replace(USED, cpu_ms=16 * 220_000)
    cell.start("job", cores=16)
    cell.record(cell.cores("job", 1))
    cell.finish("job", 220_000, used=busy)
    assert cell.ledger.past_cores.of(JOB.owner) == ()
    cell.start("next")
    cell.finish("next", 220_000, used=busy)
    assert [past.cores for past in cell.ledger.past_cores.of(JOB.owner)] == [20]


def searched(cell: Disturbed, *, probes_ms: int, then_ms: int, settled: int = 8) -> FinishedRun:
    """Placed with two cores, probed with four and eight, and left with `settled`: a step takes 300, 150 and
    100 ms."""
    cell.start("job", cores=2)
    cell.report("job", 1)
    cell.after(probes_ms // 3, cell.cores("job", 4, "probe"))
    cell.report("job", 101, steps=100, step_ms=150.0)
    cell.after(probes_ms // 3, cell.cores("job", 8, "probe"))
    cell.after(probes_ms // 3, cell.cores("job", settled, "settled"))
    cell.report("job", 102)
    cell.report("job", 1_102, steps=1_000, step_ms=100.0)
    cell.after(then_ms)
    return cell.finish("job", probes_ms + then_ms, used=replace(USED, cpu_ms=8 * 600_000))


def test_a_run_whose_cores_were_searched_for_a_small_part_of_its_time_teaches_what_the_next_will_take() -> (
    None
):
    """Under the contention-guard every training is searched for. Half a minute of ten is: its run time is
    that of a run under the guard, its step that with the cores that it settled with. What was busy is what
    the search gave: it is not what its owner's jobs need."""
    cell = Disturbed()
    run = searched(cell, probes_ms=30_000, then_ms=570_000)
    assert bits(run) == Disturbance.BRIEFLY
    assert comparable("run_ms", run.measured.disturbed)
    assert comparable("gpu_utilisation_percent", run.measured.disturbed)
    assert run.measured.step_ms == pytest.approx(100)
    assert not comparable("busy_cores", run.measured.disturbed)
    assert cell.ledger.past_cores.of(JOB.owner) == ()


def test_a_run_whose_search_took_most_of_its_time_teaches_no_run_time() -> None:
    """It was starved for half a minute of a minute and a half."""
    run = searched(Disturbed(), probes_ms=30_000, then_ms=60_000)
    assert bits(run) == Disturbance.CORES
    assert not comparable("run_ms", run.measured.disturbed)


def test_a_search_that_ends_where_it_began_is_a_small_part_of_a_long_run() -> None:
    run = searched(Disturbed(), probes_ms=30_000, then_ms=570_000, settled=2)
    assert bits(run) == Disturbance.BRIEFLY


def test_a_job_that_was_slowed_for_a_moment_teaches_and_one_that_was_for_long_does_not() -> None:
    """A CPU job loses half of its cores beside a training: for twenty seconds of ten minutes, or for five."""
    for slowed_ms, found in ((20_000, Disturbance.BRIEFLY), (300_000, Disturbance.CORES)):
        cell = Disturbed()
        cell.start("job")
        cell.after(200_000, cell.cores("job", 2, "contention"))
        cell.after(slowed_ms, cell.cores("job", 4, "released"))
        cell.after(400_000 - slowed_ms)
        assert bits(cell.finish("job", 600_000)) == found


def test_a_run_whose_search_ended_before_a_snapshot_teaches_if_it_runs_on_for_long() -> None:
    """The estimator restarts after the search: it does not know how long each number of cores lasted, so all
    before the last change counts as unusual."""
    for then_ms, found in ((1_200_000, Disturbance.BRIEFLY), (60_000, Disturbance.CORES)):
        cell = Disturbed()
        cell.start("job", cores=2)
        cell.after(20_000, cell.cores("job", 4, "probe"))
        cell.after(20_000, cell.cores("job", 4, "settled"))
        cell.restart()
        cell.after(then_ms)
        assert bits(cell.finish("job", then_ms)) == found


def test_throttled_from_the_beginning_it_teaches_no_step() -> None:
    """Memory bandwidth capped at half before the first window; iterations and losses count all the same."""
    cell = Disturbed()
    cell.start("job")
    cell.record(
        BandwidthDecided(
            job_id="job",
            attempt=1,
            task_id="job/1/0",
            node_id="node-1",
            by="guard",
            reason="contention",
            memory_bandwidth_percent=50,
        )
    )
    cell.report("job", 1, loss=3.0)
    cell.report("job", 1_000, steps=999, step_ms=300.0, loss=1.0)
    run = cell.finish("job", 300_000)
    assert bits(run) == Disturbance.CAPPED
    assert math.isnan(run.measured.step_ms)
    assert run.measured.iterations == 1_000
    assert run.steps is not None
    assert len(run.steps.curve) == 2
    assert sample_of(run) is None


def test_a_moldable_job_at_half_its_workers_is_no_run_of_all_of_them() -> None:
    """Two workers did two hours, and saved; four did the rest. The sum is a run time in neither shape."""
    cell = Disturbed()
    spec = JobSpec(
        owner="ada",
        command=("t.py",),
        model="m",
        workers=4,
        min_workers=2,
        global_batch_size=64,
        checkpoint="sdk",
    )
    cell.start("job", spec, workers=2)
    cell.after(2 * HOUR_MS, cell.saved("job", shared=True))
    cell.stopped("job")
    cell.start("job", attempt=2, workers=4)
    run = cell.finish("job", HOUR_MS, attempt=2, workers=4)
    assert bits(run) == Disturbance.SHAPES
    assert run.info.workers == 4


def test_what_disturbed_a_job_before_a_snapshot_is_known_after_it() -> None:
    """The estimator restarts while `job` runs beside `guest` with a core less than it was placed with. What
    was measured alone before is read again, where it is, and the run counts as disturbed."""
    cell = Disturbed()
    cell.start("kept", SAVES, gpus=(2,))
    cell.after(2 * HOUR_MS, cell.saved("kept"))
    cell.stopped("kept")
    cell.start("kept", attempt=2, gpus=(2,))
    cell.start("job", milli=500)
    cell.record(cell.cores("job", 3))
    cell.start("guest", milli=500)
    cell.report("job", 1)
    cell.report("job", 501, steps=500, step_ms=200.0)
    known = cell.progress("job")
    offset = cell.restart()
    found = cell.progress("job")
    assert (found.placed, found.conditions) == (known.placed, known.conditions)
    assert (found.since_ms, found.disturbed) == (known.since_ms, known.disturbed)
    recall(cell.ledger, cell.values[recall_from(cell.ledger, offset) :])
    assert cell.progress("job").windows.mean_ms == pytest.approx(200)
    cell.finish("guest", 60_000)
    assert cell.progress("job").conditions.neighbours == ()
    assert bits(cell.finish("job", 250_000)) == Disturbance.SHARED | Disturbance.CORES
    assert cell.finish("kept", HOUR_MS, attempt=2).measured.run_ms == 3 * HOUR_MS


STAGES = StagesMeasured(
    node_id="node-1",
    task_id="job/1/0",
    token=1,
    at_ms=1,
    iterations=10,
    samples=(StageSample(lasted_ms=100.0, gpu=1.0),) * 40,
)


def test_stages_measured_beside_a_neighbour_are_no_profile() -> None:
    """Whole GPUs, and cores taken away in the midst of the samples: an iteration that waits for data is none
    of the model's."""
    cell = Disturbed()
    cell.start("job")
    cell.record(cell.cores("job", 1))
    cell.record(STAGES)
    assert cell.ledger.stages.rejected == {"it was disturbed": 1}
    cell.record(cell.cores("job", 4))
    cell.record(STAGES)
    assert cell.ledger.stages.rejected == {"it was disturbed": 2}, "it reaches back to one core"
    cell.after(60_000, STAGES)
    assert len(cell.ledger.stages) == 1


def test_stages_measured_with_the_cores_that_a_search_ended_with_are_the_models() -> None:
    """A training is left with eight cores, and reports its stages an hour later: they are what it takes with
    what it needs. While it was tried with one core they were not."""
    cell = Disturbed()
    cell.start("job")
    cell.record(cell.cores("job", 1, "probe"))
    cell.record(STAGES)
    assert cell.ledger.stages.rejected == {"it was disturbed": 1}
    cell.record(cell.cores("job", 8, "settled"))
    cell.after(HOUR_MS, STAGES)
    assert len(cell.ledger.stages) == 1


def test_the_rate_of_disturbed_time_is_not_that_of_undisturbed_time() -> None:
    """A guest slows each step to twice its time and leaves. What is left is counted at the pace of the
    conditions that it has now: before they have been measured with a wide interval around the pace before,
    afterwards by what was measured in them, also earlier."""
    cell = Disturbed()
    etas = updates_of(cell.ledger)
    cell.start("job", replace(JOB, iterations=10_000), milli=500)
    cell.report("job", 1)
    cell.report("job", 1_000, steps=999, step_ms=100.0)
    alone = etas.next("job")
    assert alone is not None
    assert alone.left_ms.middle == pytest.approx(900_000)
    cell.start("guest", milli=500)
    cell.report("job", 2_000, steps=1_000, step_ms=150.0)
    mixed = etas.next("job")
    assert mixed is not None
    assert mixed.left_ms.middle == pytest.approx(800_000)
    assert mixed.left_ms.high > 1.9 * mixed.left_ms.middle, "a guest may halve its pace"
    cell.report("job", 3_000, steps=1_000, step_ms=200.0)
    beside = etas.next("job")
    assert beside is not None
    assert beside.left_ms.middle == pytest.approx(1_400_000, rel=0.01)
    cell.finish("guest", 60_000)
    cell.report("job", 3_500, steps=500, step_ms=140.0)
    again = etas.next("job")
    assert again is not None
    assert again.left_ms.middle == pytest.approx(650_000)
