"""Jobs that launch before their GPUs are free in simulated cells of several nodes, with gangs: everything stays sound, and nobody loses by it."""

from statistics import fmean

import pytest

from penstock.model.settings import PlacerSettings
from penstock.policies.prelaunch import MAX_FALSE_ENDS
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.sharing import Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.report.measured import measured
from penstock.simulator.report.timeline import Timeline
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.prelaunch_cells import CELLS, JOBS, Cell, run

SEEDS = {("penstock", ()): 8, ("penstock", ("groups",)): 6, ("liquid", ()): 2}
"""(profile, without) → of it; of a profile that stops jobs single runs differ by a tenth."""
UNKNOWN_SEEDS = (
    16  # of the default profile where run times are not known from the start: there it gains least
)
AT_MOST = {("penstock", ()): 0.99, ("penstock", ("groups",)): 0.97, ("liquid", ()): 0.98}
"""Mean completion time, relative to without. All of it in `python -m tests.simulation.prelaunch_cells`."""
CHECKED = 2  # of these seeds the CI run checks the invariants after each record, which takes half of a run
SEEDS_AT_LENGTH = 16


def _name(cell: Cell) -> str:
    return " ".join((cell.profile, *cell.without, cell.durations))


def _ratios(cell: Cell, seeds: int, checked: int) -> list[float]:
    """Mean completion times with early launches relative to those without; invariants are checked in the first `checked` seeds."""
    found = []
    for seed in range(seeds):
        early, late = (run(seed, cell, prelaunch=on, checked=seed < checked) for on in (True, False))
        assert early.finished_jobs == late.finished_jobs == JOBS
        found.append(early.avg_jct_s / late.avg_jct_s)
    return found


@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_a_busy_cell_gains_by_it(cell: Cell) -> None:
    """Invariants hold after each record, all jobs end, and on average they end earlier, whatever is known of run times."""
    key = cell.profile, cell.without
    seeds = UNKNOWN_SEEDS if key == ("penstock", ()) and cell.durations != "known" else SEEDS[key]
    ratios = _ratios(cell, seeds, CHECKED)
    assert fmean(ratios) < AT_MOST[key], ratios


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.profile == "penstock"], ids=_name)
def test_more_seeds_show_more_of_it(cell: Cell) -> None:
    """Twice the runs of the default profile, all with their invariants."""
    ratios = _ratios(cell, SEEDS_AT_LENGTH, SEEDS_AT_LENGTH)
    assert fmean(ratios) < AT_MOST[cell.profile, ()], ratios


@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_who_is_stopped_is_followed_by_a_launch(profile: str) -> None:
    """Under profiles that preempt, a job launches while the one that makes way for it saves; work is lost by nobody."""
    early, late = (run(1, Cell(profile, "known"), prelaunch=on, restarts=True) for on in (True, False))
    assert early.finished_jobs == late.finished_jobs == JOBS
    assert early.lost_gpu_h == late.lost_gpu_h == 0
    assert early.avg_jct_s < 1.02 * late.avg_jct_s


def test_a_report_counts_who_launched_early_and_in_vain() -> None:
    """Two jobs on one GPU, of which the first is said to run for 30 s and runs for 100: the second launches in vain, twice, and is started when
    the first has ended. A third one launches while the second comes to its end."""

    class Longer(Constant):
        def speed(self, job: TraceJob, *given: object) -> float:  # type: ignore[override]
            return 0.3 if job.job_id == "first" else 1.0

    timeline = Timeline()
    model = Phases(Longer(), 5.0, 2.0)
    jobs = [TraceJob(name, 0.0, 30.0, 1) for name in ("first", "second", "third")]
    options = Options(durations="known", prelaunch=True, check_every_step=True)
    settings = PlacerSettings(profile="liquid", prelaunch_wait_ms=10_000)
    simulation = Simulation(nodes_of("1x1"), settings, SteadyWork(model), jobs, options, timeline.take)
    while simulation.step():
        pass
    assert simulation.meter.finished == 3
    assert (timeline.prelaunches, timeline.given_back) == (3, MAX_FALSE_ENDS)
    assert len(timeline.early_ms) == 1
    text = measured(timeline, live=False)["restarts"]
    assert "3 attempts launched before their GPUs were free" in text
    assert "2 of them in vain" in text
