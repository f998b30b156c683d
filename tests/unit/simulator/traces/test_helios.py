"""Jobs generator_from after the sums that a cluster published."""

from math import exp, log
from pathlib import Path
from statistics import NormalDist, median

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.generators.summary import JOBS, LOAD, MOST_S, Law, Sums, generator_from, law_of
from penstock.simulator.traces.cluster import nodes_of

VENUS = Sums("Venus", 1_022, 125_303, 13_040.6, 204.0, 6.736, 12.3456e9)
EARTH = Sums("Earth", 997, 427_148, 5_130.6, 234.0, 2.101, 11.4392e9)


def sums_of(law: Law) -> dict[str, float]:
    """Expectations of the law, by the formulas of the log-normal."""
    means = [exp(law.mu + law.growth * n + law.sigma**2 / 2) for n in range(len(law.shares))]
    pairs = list(enumerate(zip(law.shares, means, strict=True)))
    return {
        "shares": sum(law.shares),
        "mean_gpus": sum(share * 2**n for n, (share, _) in pairs),
        "mean_run_s": sum(share * mean for _, (share, mean) in pairs),
        "gpu_s": sum(share * 2**n * mean for n, (share, mean) in pairs),
    }


@pytest.mark.parametrize("sums", [VENUS, EARTH])
def test_the_law_has_the_published_sums(sums: Sums) -> None:
    """Two clusters: one where large jobs run about as long as small ones, one where they run much longer."""
    law = law_of(sums)
    assert sums_of(law) == pytest.approx(
        {
            "shares": 1.0,
            "mean_gpus": sums.mean_gpus,
            "mean_run_s": sums.mean_run_s,
            "gpu_s": sums.gpu_s / sums.jobs,
        }
    )
    assert law.shares[0] >= 0.5 - 1e-9, "the median job has one GPU"
    shorter = [
        NormalDist(law.mu + law.growth * n, law.sigma).cdf(log(sums.median_run_s))
        for n in range(len(law.shares))
    ]
    assert sum(share * part for share, part in zip(law.shares, shorter, strict=True)) == pytest.approx(0.5)


def test_jobs_are_drawn_from_the_law_at_the_assumed_load() -> None:
    """A day of Earth, for policies to be compared on: another seed, another day with the same sums."""
    generator = generator_from(EARTH, Path("summary.csv"))
    jobs = generator.make(1)
    assert len(jobs) == JOBS
    assert generator.make(1) == jobs
    assert generator.make(2) != jobs
    assert median(job.duration_s for job in jobs) == pytest.approx(EARTH.median_run_s, rel=0.1)
    assert sum(job.gpus for job in jobs) / JOBS == pytest.approx(EARTH.mean_gpus, rel=0.1)
    rate = JOBS / jobs[-1].submit_s
    assert rate * EARTH.gpu_s / EARTH.jobs / EARTH.gpus == pytest.approx(LOAD, rel=0.05)
    assert all(0 < job.duration_s <= MOST_S for job in jobs)
    assert sum(len(node.gpus) for node in nodes_of(generator.cluster)) == EARTH.gpus
    assert max(job.gpus for job in jobs) <= EARTH.gpus


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (VENUS._replace(mean_gpus=0.5), "no law of this kind has this mean GPUs"),
        (VENUS._replace(median_run_s=20_000.0), "no law of this kind has this median run time"),
        (VENUS._replace(gpu_s=1.0), "no law of this kind has this GPU time"),
    ],
)
def test_sums_that_no_cluster_can_have_are_refused(sums: Sums, message: str) -> None:
    """Half a GPU on average, a median above the mean of a long tail, less GPU time than run time: a broken
    table."""
    with pytest.raises(BadFile, match=message):
        generator_from(sums, Path("summary.csv"))
