"""Gavel's FIFO on its 96 jobs, event by event: what its own rounds of six minutes add to the measured speeds.

Its simulator reports 13,818 s of average JCT on 32 V100; the same jobs without rounds and their bookkeeping
come to 12,521 s. Placement plays no part there: all GPUs are one pool, and every job runs at its consolidated
speed.
"""

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.catalogue import Run, work_for
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import read_trace
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "gavel"
TRACE = DATA / "traces/max_min_fairness.trace"

pytestmark = pytest.mark.skipif(
    not TRACE.is_file(),
    reason=f"Gavel's trace is not in {DATA}; set PENSTOCK_DATA to the folder that holds gavel/",
)


def test_event_driven_fifo_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict FIFO: no backfill. A worker per GPU, and nodes of one GPU for the job model: nothing ever counts
    as spread."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA.parent))
    trace = read_trace(TRACE)
    settings = PlacerSettings(profile="fifo", backfill_window=1)
    work = work_for("colocation", trace, TRACE, settings, Run(gpus_per_node=1))
    simulation = Simulation(nodes_of("2x16"), settings, work, trace.jobs, Options(single_gpu_workers=True))
    while simulation.step():
        pass
    figures = simulation.figures(1, 1)
    assert figures.finished_jobs == 96
    assert figures.avg_jct_s == pytest.approx(12_521, abs=1)
