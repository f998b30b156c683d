"""Tiresias in Pollux's experiments, through the real placer: 160 jobs of six measured models on 16 × 4 T4.

Reference: the published per-job completion times (`data/pollux/published_results`). The source decides in
steps of 60 s and calls a queue by strict arrival: hence `tick_s` and `tiresias-fifo`.
"""

import json
import os
from pathlib import Path

import pytest

from penstock.events.facts import PlacerSettings
from penstock.simulator.cluster import nodes_of
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.traces import read_trace
from penstock.simulator.truths import Run, work_for

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data")) / "pollux"
PUBLISHED = DATA / "published_results/results-jobload__tiresias-1.0.json"
WITHIN = 0.01
SAME_S = 1.0  # a job's completion, where nothing differs
DIFFERENT = 2  # jobs that may: a tie between equal nodes

pytestmark = pytest.mark.skipif(
    not PUBLISHED.is_file(),
    reason=f"Pollux's measurements are not in {DATA}; set PENSTOCK_DATA to the folder that holds pollux/",
)


@pytest.mark.parametrize("workload", range(1, 9))
def test_published_completion_times_come_out(workload: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the mean: job by job, including what was preempted and where it was placed afterwards."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA.parent))
    path = DATA / "workloads" / f"workload-{workload}.csv"
    settings = PlacerSettings(profile="tiresias-fifo", queue_limits_gpu_s=(57_600.0,))
    trace = read_trace(path, most_gpus=64)
    simulation = Simulation(
        nodes_of("16x4"),
        settings,
        work_for("placement-table", trace, path, settings, Run(gpus_per_node=4, tick_s=60.0)),
        trace.jobs,
        Options(single_gpu_workers=True, tick_s=60.0),
    )
    while simulation.step():
        pass
    right = json.loads(PUBLISHED.read_text())["jcts"][f"workload-{workload}"]
    found = {job_id: life.jct_s for job_id, life in simulation.meter.lives.items()}
    assert found.keys() == right.keys()
    assert sum(found.values()) / 160 == pytest.approx(sum(right.values()) / 160, rel=WITHIN)
    different = {job_id for job_id, jct_s in right.items() if abs(found[job_id] - jct_s) > SAME_S}
    assert len(different) <= DIFFERENT, different
