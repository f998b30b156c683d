"""Stage profiles in the ledger: what an iteration of a kind of job uses, as of any record."""

from msgspec.structs import replace

from penstock.ledger.snapshot import dump, load
from penstock.ledger.stages import MAX_PROFILES, profile_of
from penstock.model.estimates import StagesProfiled
from tests.support.driver import CellDriver, estimate, job_spec

PROFILE = StagesProfiled(
    model="resnet50", batch_size=64, gpus=2, storage_ms=6.5, cpu_ms=12.0, gpu_ms=38.25, network_ms=4.25,
    idle_ms=0.0, iteration_ms=61.0, iterations=20,
)  # fmt: skip


def test_jobs_of_one_kind_have_the_latest_profile_of_it() -> None:
    """Two workers of one GPU each train what a job of two GPUs was measured with; another batch size was never measured."""
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
            "same": replace(PROFILE, gpu_ms=40.0), "larger": None, "wider": None, "nameless": None,
        }  # fmt: skip


def test_a_sweep_of_batch_sizes_pushes_out_the_oldest() -> None:
    """Somebody profiles every batch size there is: the state stays bounded, and what was published last stays."""
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
