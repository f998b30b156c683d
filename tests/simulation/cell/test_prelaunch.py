"""Jobs that launch before their GPUs are free in simulated cells of several nodes, with gangs: everything
stays sound, and nobody loses by it."""

from collections.abc import Mapping
from math import hypot, sqrt
from statistics import fmean

import pytest

from penstock.model.nouns.settings import PlacerSettings, Stage
from penstock.scheduling.make_room.prelaunch import MAX_FALSE_ENDS
from penstock.simulator.engine import Durations, Options, Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.sharing import Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.report.measured import measured
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.cell.prelaunch_cells import JOBS, Cell, run
from tests.support.chance import SURE

RATIOS: Mapping[tuple[str, tuple[Stage, ...]], Mapping[Durations, tuple[float, float, int]]] = {
    ("penstock", ()): {
        "known": (0.956, 0.036, 20),
        "learned": (0.981, 0.047, 4),
        "unknown": (0.969, 0.038, 10),
    },
    ("penstock", ("groups",)): {
        "known": (0.954, 0.044, 24),
        "learned": (0.975, 0.041, 4),
        "unknown": (0.978, 0.036, 10),
    },
    ("liquid", ()): {
        "known": (0.940, 0.041, 10),
        "learned": (0.964, 0.034, 2),
        "unknown": (0.972, 0.026, 8),
    },
}
"""(profile, without) → run times → (mean, standard deviation, seeds of a short run).

Of the mean completion time relative to that without early launches, 60 seeds. Without effect it is 1: the
mean of a profile's runs lies 5.5 standard deviations or more below. Most seeds are where a run costs least.
All of it: `python -m tests.simulation.cell.prelaunch_cells`.
"""
IN_CI = ("liquid", ())  # shows the same in a quarter of the time that `penstock` needs
CHECKED = 2  # of these seeds the CI run checks the invariants after each record, which takes half of a run
SEEDS_AT_LENGTH, CHECKED_AT_LENGTH = 24, 12
SRTF = (0.995, 0.030)
"""The same for a profile that preempts, 30 seeds; of `tiresias` 0.999 ± 0.004."""
STOPS = 40
"""Seeds after which a loss of 2 % lies five standard deviations off."""


def _name(part: str | tuple[Stage, ...]) -> str:
    return part if isinstance(part, str) else " ".join(part) or "all"


def _ratios(cell: Cell, seeds: int, checked: int) -> list[float]:
    """Mean completion times with early launches relative to those without; invariants are checked in the
    first `checked` seeds."""
    found = []
    for seed in range(seeds):
        early, late = (run(seed, cell, prelaunch=on, checked=seed < checked) for on in (True, False))
        assert early.finished_jobs == late.finished_jobs == JOBS
        found.append(early.avg_jct_s / late.avg_jct_s)
    return found


@pytest.mark.parametrize(
    ("profile", "without"),
    [pytest.param(*key, marks=() if key == IN_CI else pytest.mark.slow) for key in RATIOS],
    ids=_name,
)
def test_a_busy_cell_gains_by_it(profile: str, without: tuple[Stage, ...]) -> None:
    """Invariants hold after each record, all jobs end, and on average they end earlier."""
    ratios = [
        ratio
        for durations, (_, _, seeds) in RATIOS[profile, without].items()
        for ratio in _ratios(Cell(profile, durations, without), seeds, CHECKED)
    ]
    assert fmean(ratios) < 1, ratios


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "without"), list(RATIOS)[:2], ids=_name)
def test_more_seeds_show_more_of_it(profile: str, without: tuple[Stage, ...]) -> None:
    """As many of each cell, half of them with their invariants: within chance of the measured gain."""
    figures = RATIOS[profile, without]
    ratios = [
        fmean(_ratios(Cell(profile, durations, without), SEEDS_AT_LENGTH, CHECKED_AT_LENGTH))
        for durations in figures
    ]
    means, spreads, _ = zip(*figures.values(), strict=True)
    off = hypot(*spreads) / len(spreads) / sqrt(SEEDS_AT_LENGTH)
    assert fmean(ratios) < fmean(means) + SURE * off, ratios


def _stopped(profile: str, seed: int, *, checked: bool) -> float:
    """The ratio under a profile that preempts; work is lost by nobody."""
    early, late = (
        run(seed, Cell(profile, "known"), prelaunch=on, restarts=True, checked=checked)
        for on in (True, False)
    )
    assert early.finished_jobs == late.finished_jobs == JOBS
    assert early.lost_gpu_h == late.lost_gpu_h == 0
    return early.avg_jct_s / late.avg_jct_s


@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_who_is_stopped_is_followed_by_a_launch(profile: str) -> None:
    """Under profiles that preempt, a job launches while the one that makes way for it saves.

    Work is lost by nobody; no run is longer by a sixth.
    """
    mean, spread = SRTF
    assert _stopped(profile, 1, checked=True) < mean + SURE * spread


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_launches_after_stops_cost_nothing_on_average(profile: str) -> None:
    assert fmean(_stopped(profile, seed, checked=False) for seed in range(STOPS)) < 1.02


def test_a_report_counts_who_launched_early_and_in_vain() -> None:
    """Two jobs on one GPU, of which the first is said to run for 30 s and runs for 100: the second launches
    in vain, twice, and is started when the first has ended. A third one launches while the second comes to
    its end."""

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
