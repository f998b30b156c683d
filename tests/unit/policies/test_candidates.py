"""What regroup stages are asked: candidates know the stages of their iterations from the record of a profile on."""

from msgspec.structs import replace

from penstock.ledger.job_state import JobState
from penstock.ledger.stages import times_of
from penstock.ledger.state import CellState
from penstock.model.estimates import StagesProfiled
from penstock.model.settings import PlacerSettings
from penstock.model.types import StageTimes
from penstock.policies.candidates import Candidates
from tests.support.driver import CellDriver, estimate, job_spec, node_spec

PROFILE = StagesProfiled(
    model="resnet50", batch_size=64, gpus=2, storage_ms=6.5, cpu_ms=12.0, gpu_ms=38.25, network_ms=4.25,
    idle_ms=0.0, iteration_ms=61.0, iterations=20,
)  # fmt: skip


def by_order(_: CellState, job: JobState) -> float:
    return float(job.order)


def stages(candidates: Candidates, cell: CellDriver) -> dict[str, StageTimes | None]:
    question = candidates.question(cell.state)
    assert question is not None
    return {job.job_id: job.stages for job in question.jobs}


def test_a_profile_counts_for_who_runs_and_who_waits_from_its_record_on() -> None:
    """One of a kind runs, others wait and were asked about before; then the first has shown what an iteration of theirs uses, and
    later that it has changed. Workers with parameter servers cannot take turns, whatever they use."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 2))
    spec = replace(job_spec(workers=2), model="resnet50", batch_size=64)
    cell.submit("runs", spec, estimate(1))
    cell.submit("waits", spec, estimate(1))
    cell.submit("servers", replace(spec, parameter_servers=1), estimate(1))
    candidates = Candidates("test", by_order, per_gpus=4)
    assert stages(candidates, cell) == {"runs": None, "waits": None, "servers": None}
    for profile in (PROFILE, replace(PROFILE, gpu_ms=40.0)):
        cell.feed(profile)
        times = times_of(profile)
        assert stages(candidates, cell) == {"runs": times, "waits": times, "servers": None}
