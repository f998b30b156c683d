"""Tiresias in Pollux's experiments, through the real placer: 160 jobs of six measured models on 16 × 4 T4.

Reference: the published per-job completion times (`data/pollux/published_results`). The source decides in
steps of 60 s and calls a queue by strict arrival: hence `tick_s` and `tiresias-fifo`.
"""

import json

import pytest

from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.catalogue import Run, work_for
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.fitting import ClusterCapacity
from tests.support.data import DATA_ROOT
from tests.support.own_settings import limited

DATA = DATA_ROOT / "pollux"
PUBLISHED = DATA / "published_results"
FOLDERS = {"0.5": "workloads-0.5", "1.0": "workloads", "1.5": "workloads-1.5", "2.0": "workloads-2.0"}
IN_CI = {("0.5", 1), ("0.5", 2), ("1.0", 1), ("1.0", 2)}
"""(load, workload); `make long` runs all of them, in minutes."""

pytestmark = pytest.mark.skipif(
    not PUBLISHED.is_dir(),
    reason=f"Pollux's measurements are not in {DATA}; set PENSTOCK_DATA to the folder that holds pollux/",
)


@pytest.mark.parametrize(
    ("load", "workload"),
    [
        pytest.param(load, workload, marks=() if (load, workload) in IN_CI else pytest.mark.slow)
        for load in FOLDERS
        for workload in range(1, 9)
    ],
)
def test_published_completion_times_come_out(
    load: str, workload: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the mean: every job to the second, including what was preempted and where it was placed
    afterwards."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA.parent))
    path = DATA / FOLDERS[load] / f"workload-{workload}.csv"
    settings = limited("tiresias-fifo", 57_600.0)
    trace = read_trace(path, fits=ClusterCapacity(nodes_of("16x4")).problems)
    simulation = Simulation(
        nodes_of("16x4"),
        settings,
        work_for("placement-table", trace, path, settings, Run(gpus_per_node=4, tick_s=60.0)),
        trace.jobs,
        Options(single_gpu_workers=True, tick_s=60.0),
    )
    while simulation.step():
        pass
    published = PUBLISHED / f"results-jobload__tiresias-{load}.json"
    right = json.loads(published.read_text())["jcts"][f"workload-{workload}"]
    found = {job_id: round(life.jct_s) for job_id, life in simulation.meter.lives.items()}
    assert found == right
