"""Muri's own baselines through the real placer: SRTF, SRSF and Tiresias-L on the authors' traces.

Reference: `data/muri/reference_results.csv`, the figures in the authors' plots (Figs. 9 and 10). Here trace3;
all traces in table `muri-baselines` of `make papers`.
"""

import csv

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.catalogue import work_for
from penstock.simulator.meter import Figures
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.fitting import ClusterCapacity
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "muri"
WITHIN = 1e-4  # 0.01 %
POLICIES = {"srtf": "SRTF", "srsf": "SRSF", "tiresias": "Tiresias_L"}

needs_data = pytest.mark.skipif(
    not (DATA / "reference_results.csv").is_file(),
    reason=f"Muri's traces are not in {DATA}; set PENSTOCK_DATA to the folder that holds muri/",
)


def simulate(trace: str, profile: str) -> Figures:
    path = DATA / "trace-data" / f"{trace}.csv"
    settings = PlacerSettings(profile=profile)
    read = read_trace(path, fits=ClusterCapacity(nodes_of("8x8")).problems)
    simulation = Simulation(nodes_of("8x8"), settings, work_for("muri", read, path, settings), read.jobs)
    while simulation.step():
        pass
    return simulation.figures(0, 0)


def reference(trace: str, profile: str) -> dict[str, float]:
    with (DATA / "reference_results.csv").open() as file:
        return {
            row["metric"]: float(row["value_s"])
            for row in csv.DictReader(file)
            if (row["policy"], row["trace"]) == (POLICIES[profile], trace)
        }


def judge(trace: str, profile: str) -> None:
    found, right = simulate(trace, profile), reference(trace, profile)
    assert found.unfinished_jobs == 0
    assert {
        "JCT": found.avg_jct_s,
        "Makespan": found.makespan_s,
        "99JCT": found.p99_jct_s,
    } == pytest.approx(right, rel=WITHIN)


@needs_data
@pytest.mark.parametrize("profile", POLICIES)
def test_the_published_figures_come_out(profile: str) -> None:
    """Somebody asks whether this scheduler's SRTF is the SRTF of the papers: it is, to seven digits."""
    judge("trace3", profile)
