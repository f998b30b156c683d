"""Workloads by rule: the same seed gives the same jobs, and their shares are those of the sources."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.generators.base import poisson_arrivals, rng_of
from penstock.simulator.generators.registry import generate, generator_of, generators
from penstock.simulator.job_models.catalogue import Run, checked_job_model, work_for
from penstock.simulator.traces.cluster import BadCluster, cluster_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.small_tables import write_tables
from tests.support.chance import SURE, sure_range
from tests.support.data import DATA_ROOT as DATA

needs_data = pytest.mark.skipif(
    not (DATA / "pollux").is_dir(), reason=f"no measured tables in {DATA}; set PENSTOCK_DATA to their folder"
)
GENERATORS = generators()
LARGE = frozenset({"coda/3-days"})
LARGEST = "coda/month"
"""Run by `tests.papers.coda.coda_tables`."""
WITHOUT_TABLES = ("poisson/10-per-hour", "poisson/60-per-hour", "coda/3-days", "coda/month")


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of our own; what needs the measured ones sets them itself."""
    monkeypatch.setenv("PENSTOCK_DATA", str(write_tables(tmp_path / "data")))


def jobs_of(name: str, seed: int = 0) -> Sequence[TraceJob]:
    return GENERATORS[name].make(seed)


def test_arrivals_are_poisson() -> None:
    """A thousand days at 10 an hour: the mean and the variance of a day's arrivals are both 240."""
    days = [len(poisson_arrivals(rng_of(day, "test"), 10, 24)) for day in range(1_000)]
    mean = fmean(days)
    assert mean == pytest.approx(240, abs=SURE * sqrt(240 / 1_000))
    assert fmean((day - mean) ** 2 for day in days) == pytest.approx(240, rel=SURE * sqrt(2 / 1_000))
    times = poisson_arrivals(rng_of(0, "test"), 10, 24)
    assert list(times) == sorted(times)
    assert 0 < times[0] < times[-1] < 86_400


def test_seeds_of_different_purposes_have_nothing_in_common() -> None:
    draws = {
        tuple(rng_of(seed, purpose).random(3).tolist())
        for seed in (-1, 0, 1, 1 << 40)
        for purpose in ("a", "b")
    }
    assert len(draws) == 8


def test_any_rate_of_a_plain_day_exists() -> None:
    """Somebody wants a busier day than those in the list."""
    found = generator_of("poisson/200-per-hour")
    assert found is not None
    jobs = found.make(0)
    assert len(jobs) == pytest.approx(4_800, abs=SURE * sqrt(4_800))
    shares = Counter(job.gpus for job in jobs)
    assert shares[1] in sure_range(0.70, len(jobs))
    assert all(60 <= job.duration_s <= 86_400 for job in jobs)
    for name in ("poisson/0-per-hour", "poisson/x-per-hour", "poisson/10", "genie/7-per-hour", ""):
        assert generator_of(name) is None, name


def test_any_mix_of_muri_s_models_asks_for_its_load() -> None:
    """Somebody wants three quarters of the jobs on one GPU, and half as much again as the cluster has."""
    found = generator_of("muri-mix/75-percent-1-gpu-load-150")
    assert found is not None
    jobs = found.make(0)
    assert sum(job.gpus == 1 for job in jobs) in sure_range(0.75, len(jobs))
    asked_s = sum(job.duration_s * job.gpus for job in jobs)
    assert asked_s / jobs[-1].submit_s / 64 == pytest.approx(1.5)
    for name in ("muri-mix/101-percent-1-gpu-load-100", "muri-mix/50-percent-1-gpu-load-0", "muri-mix/50"):
        assert generator_of(name) is None, name


def test_jobs_that_cannot_run_are_told() -> None:
    """A small cluster for a large workload: every job that is too large, by name."""
    generator = GENERATORS["poisson/10-per-hour"]

    def fits(job: TraceJob) -> Sequence[tuple[str, str]]:
        return [("gpus", "too large")] if job.gpus > 4 else []

    with pytest.raises(BadFile, match=r"file, column gpus: job poisson-\d+: too large"):
        generate("poisson/10-per-hour", generator, 0, fits)


def test_without_tables_a_generator_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    for name in GENERATORS:
        if name in WITHOUT_TABLES:
            assert jobs_of(name)
        else:
            with pytest.raises(BadFile, match="this generator needs"):
                jobs_of(name)


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - {LARGEST}))
def test_the_same_seed_gives_the_same_jobs(name: str) -> None:
    """And another seed gives others; jobs come in order of arrival, each with an id of its own."""
    jobs = jobs_of(name, 3)
    assert jobs == jobs_of(name, 3)
    assert jobs != jobs_of(name, 4)
    assert [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)
    assert len({job.job_id for job in jobs}) == len(jobs)
    checked_job_model(GENERATORS[name].job_model)


def run_twice(name: str) -> None:
    """As `penstock simulate <name>` does: every job ends, and the ledger is the same each time."""
    heads = set()
    for _ in range(2):
        generator = GENERATORS[name]
        trace = generate(name, generator, 1)
        cluster = cluster_of(generator.cluster)
        settings = PlacerSettings(profile="liquid", seed=1)
        run = Run(max(len(node.gpus) for node in cluster.nodes), nodes=cluster.nodes)
        work = work_for(generator.job_model, trace, Path(name), settings, run)
        simulation = Simulation(cluster.nodes, settings, work, trace.jobs, Options())
        while simulation.step():
            pass
        figures = simulation.figures(1, 1)
        assert (figures.finished_jobs, figures.unfinished_jobs) == (len(trace.jobs), 0)
        heads.add(figures.ledger_hash)
    assert len(heads) == 1


@pytest.mark.parametrize("name", sorted(GENERATORS.keys() - LARGE - {LARGEST}))
def test_a_workload_runs_to_its_end_on_its_own_cluster(name: str) -> None:
    run_twice(name)


@needs_data
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
        for name in GENERATORS
        if name != LARGEST
    ],
)
def test_it_does_so_on_the_measured_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No task of any workload comes to a placement that nobody measured."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))
    run_twice(name)


def test_liquids_batch_is_that_of_its_launchers() -> None:
    """20 nodes with 2 GPUs: 16 ResNet-50, 8 Inception V3 and 8 VGG-16, all at once, in an order of the
    seed's."""
    jobs = jobs_of("liquid/batch-20")
    assert Counter(job.model for job in jobs) == {"resnet-50": 16, "inception-v3": 8, "vgg-16": 8}
    assert {job.submit_s for job in jobs} == {0.0}
    for job in jobs:
        assert (job.gpus, job.workers, job.parameter_servers, job.server_gpus) == (2, 2, 1, 1)
        assert job.batch_size in range(8, 65, 8)
        assert job.iterations in range(200, 1_001, 50)
        stages = job.stages
        assert stages is not None
        assert stages.gpu_ms + stages.network_ms == pytest.approx(stages.iteration_ms)
        assert job.duration_s == pytest.approx((job.iterations or 0) * stages.gpu_ms / 1_000)
    vgg = next(job.stages for job in jobs if job.model == "vgg-16")
    assert vgg is not None
    assert (vgg.gpu_ms, vgg.iteration_ms) == (150, 400), "its profile on 2 and on 16 GPUs"
    sixteen = next(job.stages for job in jobs if job.model != "vgg-16" and job.batch_size == 32)
    assert sixteen is not None
    assert sixteen.gpu_ms == pytest.approx(1_100), (
        "two GPUs of one node, a third of the way from 8 to 32 samples"
    )
    assert sixteen.iteration_ms == pytest.approx(1_500), "two nodes"


@needs_data
def test_liquids_immediate_jobs_come_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the longest has ended when the next one comes, with every task on a node of its own."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))
    immediate = jobs_of("liquid/immediate")
    longest_s = max(
        (job.iterations or 0) * job.stages.iteration_ms / 1_000 for job in immediate if job.stages
    )
    assert longest_s < min(later.submit_s - job.submit_s for job, later in pairwise(immediate))


def test_genies_tasks_expect_what_equation_4_says() -> None:
    """A week of days: 5 : 35 : 60, half of them inference, 10 – 60 minutes alone, expecting 0, 1 or 2 such
    times."""
    jobs = [job for seed in range(7) for job in jobs_of("genie/20-per-hour", seed)]
    labels = [dict(job.labels) for job in jobs]
    shares = Counter(label["qos"] for label in labels)
    for service, share in (("urgent", 0.05), ("prior", 0.35), ("normal", 0.60)):
        assert shares[service] in sure_range(share, len(jobs)), service
    assert sum(job.inference for job in jobs) in sure_range(0.5, len(jobs))
    assert len({job.model for job in jobs}) == 6
    times = {"urgent": 0.0, "prior": 1.0, "normal": 2.0}
    for job, label in zip(jobs, labels, strict=True):
        assert 597 < job.duration_s < 3_603, "whole iterations, of up to four seconds"
        assert float(label["ect_s"]) == pytest.approx(times[label["qos"]] * (job.duration_s + 30), abs=0.001)


def test_specons_four_schedules() -> None:
    """20 every 50 s of one model, 20 in 300 s of one or of any, 30 in 600 s and 50 in 1,200 s of any; 1 – 6.5
    minutes alone."""
    for name, count, last_s, models in (
        ("fixed", 20, 950, 1),
        ("random-20", 20, 300, 5),
        ("random-20-one", 20, 300, 1),
        ("random-30", 30, 600, 5),
        ("random-50", 50, 1_200, 5),
    ):
        jobs = jobs_of(f"specon/{name}", 5)
        assert len(jobs) == count
        assert jobs[-1].submit_s <= last_s
        assert (len({job.model for job in jobs}) == 1) == (models == 1), name
        assert all(60 <= job.duration_s <= 390 and job.gpus == 0 for job in jobs)
    assert jobs_of("specon/fixed", 5)[-1].submit_s == 950


def test_codas_month_is_as_published() -> None:
    """Three days of it: how long trainings run, what they ask for, who submits, and that CPU jobs go by day
    and night and trainings do not."""
    jobs = jobs_of("coda/3-days")
    new = [job for job in jobs if job.gpus and job.submit_s > 0]
    without = [job for job in jobs if not job.gpus]
    assert (len(new), len(without)) == (2_500, 7_500)
    assert sum(job.duration_s > 3_600 for job in new) in sure_range(0.685, len(new))
    assert sum(job.duration_s > 7_200 for job in new) in sure_range(0.396, len(new))
    per_gpu = [(job.cores or 0) / job.gpus for job in new]
    assert sum((job.cores or 0) > 10 for job in new) in sure_range(0.153, len(new))
    assert fmean(cores in (1, 2) for cores in per_gpu) == pytest.approx(0.761, abs=0.06)
    assert {job.owner for job in new}.isdisjoint(f"user-{user}" for user in range(15, 21))
    days = Counter(job.submit_s % 86_400 < 43_200 for job in without)
    assert days[True] > 1.5 * days[False]
    halves = Counter(job.submit_s % 86_400 < 43_200 for job in new)
    assert halves[True] in sure_range(0.5, len(new))
    assert sum(job.memory_bandwidth >= 0.5 for job in without) in sure_range(0.005, len(without))


def test_a_clusters_text_tells_cores_and_gpu_model() -> None:
    """CODA's 80 nodes with 5 GPUs and 28 cores, SpeCon's without any GPU, T4s, and a mix of all."""
    nodes = cluster_of("2x5x28@V100+1x0x8+1x4@T4+1x2").nodes
    assert [(node.node_id, len(node.gpus), node.cores) for node in nodes] == [
        ("n00000", 5, 28),
        ("n00001", 5, 28),
        ("n00002", 0, 8),
        ("n00003", 4, 48),
        ("n00004", 2, 24),
    ]
    assert [node.gpus[0].model for node in nodes if node.gpus] == ["V100", "V100", "T4", "GPU"]
    for text in ("4x0", "4x4x", "4x4@", "4x4x0", "4x17", "1x4x2000", "20001x1x1"):
        with pytest.raises(BadCluster, match=f"cluster '{text}'"):
            cluster_of(text)
