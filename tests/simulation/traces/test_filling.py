"""Filling a cluster with jobs that never end: how packings are judged."""

# clocks: all times are those of simulated cells

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Work
from penstock.simulator.meter import Figures
from penstock.simulator.traces.arrivals import PATIENCE_S, UNTIL, fill
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.jobs import TraceJob
from tests.support.cli.command_line import penstock

SHARES = st.integers(50, 1_000).map(lambda milli: TraceJob("", 0, 9, 1, gpu_share_milli=milli))
WHOLE = st.integers(0, 8).map(lambda gpus: TraceJob("", 0, 9, gpus, cores=1.0))


def filled(jobs: list[TraceJob], profile: str, cluster: str) -> Figures:
    arrivals = [job._replace(submit_s=float(n), patience_s=PATIENCE_S) for n, job in enumerate(jobs)]
    found = Simulation(
        nodes_of(cluster),
        PlacerSettings(profile=profile),
        Work(),
        arrivals,
        Options(check_every_step=True),
    )
    while found.step():
        pass
    assert found.cell.state.queue == {} or not list(found.cell.state.queue), (
        "who finds no place is gone at once"
    )
    return found.figures(1.0, 1.0)


def test_spreading_loses_what_packing_keeps() -> None:
    """Two small jobs and a large one ask for all four GPUs of two nodes: spread out, the small ones shut it
    out."""
    jobs = [TraceJob("a", 0, 0, 1), TraceJob("b", 0, 0, 1), TraceJob("c", 0, 0, 2)]
    packed, spread = filled(jobs, "fifo", "2x2"), filled(jobs, "even", "2x2")
    assert (packed.full_load_allocation, spread.full_load_allocation) == (1.0, 0.5)
    assert (packed.finished_jobs, packed.unfinished_jobs) == (0, 3)
    assert 0 < spread.gpu_allocation <= 0.5, "over the time from the first arrival on"


def test_shares_count_as_shares() -> None:
    """Eight halves fill four GPUs; after each arrival at 100 % of the load, rounded, all of it is held."""
    halves = [TraceJob(f"h{n}", 0, 0, 1, gpu_share_milli=500) for n in range(8)]
    tail = [TraceJob("tiny", 0, 0, 1, gpu_share_milli=10)]
    found = filled([*halves, *tail], "fifo", "1x4")
    assert found.full_load_allocation == 1.0, (
        "the tiny one is turned away, and the load still rounds to 100 %"
    )
    assert filled(halves[:7], "fifo", "1x4").full_load_allocation == 0.0, "the load never got there"


def test_a_job_that_leaps_over_the_full_load_shows_what_is_held_then() -> None:
    """On two GPUs the load goes from 50 to 150 %: it was never 100 %, and the figure was 0 for a cluster half
    in use."""
    jobs = [TraceJob("a", 0, 0, 1), TraceJob("b", 0, 0, 2)]
    assert filled(jobs, "fifo", "1x2").full_load_allocation == 0.5


@settings(deadline=None)
@given(
    jobs=st.lists(st.one_of(SHARES, WHOLE), min_size=1, max_size=30),
    gpus=st.integers(1, 40),
    seed=st.integers(0, 1 << 40),
)
def test_each_job_comes_once_before_any_comes_again(jobs: list[TraceJob], gpus: int, seed: int) -> None:
    """The rules of the published figures: a permutation first, then single draws, one a second, just past the
    load."""
    named = [job._replace(job_id=f"j{n}") for n, job in enumerate(jobs)]
    if not any(job.gpus for job in named):
        return
    filled = fill(named, gpus, seed)
    assert [job.submit_s for job in filled] == [float(n) for n in range(len(filled))]
    assert len({job.job_id for job in filled}) == len(filled)
    first = [job.job_id for job in filled[: len(named)]]
    assert set(first) <= {job.job_id for job in named}, "nobody comes again before all have come"
    asked = [job.whole_gpus for job in filled]
    assert sum(asked) > UNTIL * gpus
    assert sum(asked[:-1]) <= UNTIL * gpus + 1e-9
    assert {(job.duration_s, job.patience_s) for job in filled} == {(0.0, PATIENCE_S)}
    assert fill(named, gpus, seed) == filled


def test_a_pod_that_fits_nowhere_counts_as_arrived(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each pod here wants half the GPUs; one of three wants a model or cores that the cluster lacks, and
    stays out.

    Left out of the arrivals, the load of 100 % would be reached by pods that fit, and any packing would look
    better.
    """
    path = tmp_path / "pods.csv"
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
    fit = "".join(f"fit{n},1000,1024,2,1000,\n" for n in range(3))
    path.write_text(f"{head}{fit}other,1000,1024,2,1000,H100\nwide,90000,1024,2,1000,\n")
    shares = {}
    for seed in range(12):
        line = ("simulate", str(path), "--cluster", "2x2@T4", "--profile", "fifo", "--seed", str(seed))
        assert penstock(*line, "--check", "-o", "json") == 0
        printed = capfd.readouterr()
        assert "2 jobs fit nowhere on this cluster; they count as arrived and find no place" in printed.err
        shares[seed] = json.loads(printed.out)["full_load_allocation"]
    jobs = read_trace(path).jobs
    for seed, share in shares.items():
        first = [job.job_id for job in fill(jobs, 4, seed)[:2]]
        assert share == sum(name.startswith("fit") for name in first) / 2, seed
    assert {0.5, 1.0} <= set(shares.values()), "both kinds of order came up"


def test_each_seed_has_an_order_of_its_own() -> None:
    """The published figures are means over ten orders: the file's order is none of them."""
    named = [TraceJob(f"j{n}", 0, 9, 1) for n in range(20)]
    orders = {tuple(job.job_id for job in fill(named, 20, seed)[:20]) for seed in range(10)}
    assert len(orders) == 10
    assert tuple(job.job_id for job in named) not in orders
