"""Stage profiles in the ledger: what an iteration of a kind of job uses, as of any record."""

from msgspec.structs import replace

from penstock.ledger.derived.stages import MAX_PROFILES, near_counts, profile_of, stage_times, times_of
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.nouns.types import StageTimes
from tests.support.cluster.driver import CellDriver, estimate, job_spec

PROFILE = StagesProfiled(
    model="resnet50",
    batch_size=64,
    gpus=2,
    storage_ms=6.5,
    cpu_ms=12.0,
    gpu_ms=38.25,
    network_ms=4.25,
    idle_ms=0.0,
    iteration_ms=61.0,
    iterations=20,
)


def test_jobs_of_one_kind_have_the_latest_profile_of_it() -> None:
    """Two workers of one GPU each train what a job of two GPUs was measured with; another batch size was
    never measured."""
    cell = CellDriver()
    cell.feed(PROFILE)
    cell.feed(replace(PROFILE, gpu_ms=40.0))
    spec = replace(job_spec(workers=2), model="resnet50", batch_size=64)
    cell.submit("same", spec, estimate(1))
    cell.submit("larger", replace(spec, batch_size=128), estimate(1))
    cell.submit("wider", spec, estimate(2))
    cell.submit("nameless", job_spec(workers=2), estimate(1))
    for state in (cell.state, load(dump(cell.state))):
        found = {job_id: profile_of(state, job) for job_id, job in state.jobs.items()}
        assert found == {
            "same": replace(PROFILE, gpu_ms=40.0),
            "larger": None,
            "wider": None,
            "nameless": None,
        }


def test_a_sweep_of_batch_sizes_pushes_out_the_oldest() -> None:
    """Somebody profiles every batch size there is: the state stays bounded, and what was published last
    stays."""
    cell = CellDriver()
    for batch in range(1, MAX_PROFILES + 1):
        cell.record(replace(PROFILE, batch_size=batch), cell.now_ms)
    cell.record(PROFILE, cell.now_ms)
    cell.record(replace(PROFILE, batch_size=MAX_PROFILES + 1), cell.now_ms)
    assert len(cell.state.stages) == MAX_PROFILES
    batches = [one.batch_size for one in cell.state.stages.values()]
    assert batches[:2] == [2, 3]
    assert batches[-2:] == [64, MAX_PROFILES + 1]
    assert dump(load(dump(cell.state))) == dump(cell.state)


def test_decisions_know_a_profile_from_its_own_record_on() -> None:
    """A job waits, and one runs, when the first of their kind is measured: from that record on both can be
    grouped, without a new estimate of either; and when it is measured anew, what was estimated at their
    submission counts no more."""
    cell = CellDriver()
    spec = replace(job_spec(workers=2), model="resnet50", batch_size=64)
    cell.submit("early", spec, estimate(1))
    old = StageTimes(storage_ms=1.0, cpu_ms=1.0, gpu_ms=1.0, network_ms=1.0, iteration_ms=4.0)
    cell.submit("estimated", spec, replace(estimate(1), stages=old))
    jobs = cell.state.jobs
    assert stage_times(cell.state, jobs["early"]) is None
    assert stage_times(cell.state, jobs["estimated"]) == old
    cell.feed(PROFILE)
    assert stage_times(cell.state, jobs["early"]) == times_of(PROFILE)
    assert stage_times(cell.state, jobs["estimated"]) == times_of(PROFILE)
    cell.feed(newer := replace(PROFILE, gpu_ms=40.0))
    for state in (cell.state, load(dump(cell.state))):
        assert stage_times(state, state.jobs["early"]) == times_of(newer)


def test_half_or_twice_as_many_gpus_stand_in_and_a_single_one_never() -> None:
    """What was measured on two GPUs says something of four, and nothing of one, which sends nothing over the
    network, or of eight."""
    cell = CellDriver()
    cell.feed(PROFILE)
    known = {}
    for gpus in (1, 2, 4, 8):
        spec = replace(job_spec(workers=gpus), model="resnet50", batch_size=64)
        cell.submit(f"on-{gpus}", spec, estimate(1))
        known[gpus] = stage_times(cell.state, cell.state.jobs[f"on-{gpus}"])
    assert known == {1: None, 2: times_of(PROFILE), 4: times_of(PROFILE), 8: None}
    cell.feed(wide := replace(PROFILE, gpus=8, network_ms=9.0))
    assert stage_times(cell.state, cell.state.jobs["on-4"]) == times_of(PROFILE), "half before twice"
    assert stage_times(cell.state, cell.state.jobs["on-8"]) == times_of(wide)
    assert [near_counts(gpus) for gpus in (0, 1, 2, 3, 4, 6)] == [(), (), (4,), (6,), (2, 8), (3, 12)]


def test_a_job_without_a_model_has_what_was_estimated() -> None:
    cell = CellDriver()
    times = times_of(PROFILE)
    cell.submit("nameless", job_spec(workers=2), replace(estimate(1), stages=times))
    cell.submit("unknown", job_spec(workers=2), estimate(1))
    found = [stage_times(cell.state, cell.state.jobs[name]) for name in ("nameless", "unknown")]
    assert found == [times, None]
