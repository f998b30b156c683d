"""Every trace of the data sets can be read, and has the sums that its source names."""

import pytest

from penstock.simulator.commands.options import validate
from penstock.simulator.generators.registry import of_summaries
from penstock.simulator.traces.cluster import OPENB_SLICES_PER_CORE, cluster_of, gpu_count
from penstock.simulator.traces.description import describe
from penstock.simulator.traces.files.importing import SETS, locate, names_in, read_trace
from penstock.simulator.traces.fitting import ClusterCapacity
from tests.support.cli.command_line import simulate_options
from tests.support.data import DATA_ROOT as DATA

pytestmark = pytest.mark.skipif(
    not (DATA / "openb").is_dir(),
    reason=f"the data sets are not in {DATA}; set PENSTOCK_DATA to their folder",
)


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))


@pytest.mark.parametrize("data_set", SETS)
def test_every_trace_of_every_set_is_read_without_a_problem(data_set: str) -> None:
    """Real exports of seven origins: tabs and commas, milliseconds and dates, with and without a header."""
    names = names_in(DATA, data_set)
    assert names, f"{data_set}: none found"
    for name in names:
        trace = read_trace(locate(f"{data_set}/{name}"))
        assert trace.skipped == []
        assert len(trace.lines) == len(trace.jobs)


@pytest.mark.parametrize(
    ("name", "jobs", "largest"),
    [
        ("philly/82k", 82_247, 128),
        ("muri/trace3", 992, 32),
        ("openb/default", 8_152, 8),
        ("openb/gpushare100", 8_152, 1),
        ("gavel/max_min_fairness", 96, 4),
        ("pollux/workload-6", 160, 48),
        ("tiresias/60", 60, 8),
        ("shockwave/220", 220, 8),
    ],
)
def test_they_hold_as_many_jobs_as_their_sources_say(name: str, jobs: int, largest: int) -> None:
    found = describe(read_trace(locate(name)).jobs)
    assert (found.jobs, found.largest_gpus) == (jobs, largest)


def test_openb_is_the_cluster_and_the_pods_of_the_published_figures() -> None:
    """1,213 nodes with 6,212 GPUs; 8,152 pods that ask for 97.98 % of them; every pod fits on some node."""
    cluster = cluster_of("openb")
    assert (len(cluster.nodes), gpu_count(cluster.nodes)) == (1_213, 6_212)
    assert max(node.cores for node in cluster.nodes) == 128 * OPENB_SLICES_PER_CORE
    capacity = ClusterCapacity(cluster.nodes, cluster.slices_per_core)
    jobs = read_trace(locate("openb/default"), fits=capacity.problems).jobs
    assert round(100 * sum(job.whole_gpus for job in jobs) / 6_212, 2) == 97.98
    assert sum(1 for job in jobs if not job.gpus) == 1_088


def test_openb_runs_on_its_own_cluster_unless_told_otherwise() -> None:
    """Its pods ask for up to 120 cores on one node: no made-up cluster would do."""
    own = validate(simulate_options("openb/default"))
    assert len(own.nodes) == 1_213
    assert own.options.slices_per_core == OPENB_SLICES_PER_CORE
    assert len(validate(simulate_options("openb/default", "--cluster", "8x8")).nodes) == 8


def test_helios_clusters_have_laws() -> None:
    assert list(of_summaries()) == ["helios/Venus", "helios/Earth", "helios/Saturn", "helios/Uranus"]
