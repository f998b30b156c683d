"""Variants and mixes of CODA's tables: an ablation differs from what it is compared with in what its title
names, and in nothing else."""

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.acting.guard import Guard
from penstock.scheduling.profiles import profile_for
from penstock_papers.generators.coda_month import make
from tests.papers.coda.coda_runs import (
    ABLATIONS,
    AS_TRACED,
    CODA,
    CONTENDED,
    EACH,
    LANGUAGE_AND_SPEECH,
    PART,
    WITHOUT_ELIMINATOR,
    Variant,
    mixed,
    workload,
)


def guard(variant: Variant) -> Guard | None:
    return profile_for(PlacerSettings(profile=variant.profile, contention=variant.contention)).guard


def test_the_ablations_leave_out_what_they_name() -> None:
    """Without the eliminator CODA still searches for cores as its source does, also where users named
    them."""
    whole, without = guard(CODA), guard(WITHOUT_ELIMINATOR)
    assert whole is not None
    assert whole.eliminates
    assert without == whole._replace(eliminates=False)
    arrays = next(variant for variant in ABLATIONS if variant.title.startswith("arrays alone"))
    assert guard(arrays) == whole._replace(step=None, eliminates=False)
    assert len({variant.key for variant in (CODA, *ABLATIONS)}) == 1 + len(ABLATIONS)


def test_a_mix_changes_demands_and_models_and_nothing_else() -> None:
    """A day of the trace: as many jobs, at the same times, on as many GPUs and cores."""
    jobs = make(0, 1)
    assert mixed(jobs, AS_TRACED, 0) == jobs
    found = mixed(jobs, CONTENDED, 0)
    assert found == mixed(jobs, CONTENDED, 0)
    alike = [
        job._replace(model=before.model, memory_bandwidth=before.memory_bandwidth)
        for job, before in zip(found, jobs, strict=True)
    ]
    assert alike == jobs
    assert {job.model for job in found if job.gpus} == set(LANGUAGE_AND_SPEECH)
    without = [job for job in found if not job.gpus]
    high = sum((job.memory_bandwidth or 0.0) >= 0.5 for job in without) / len(without)
    assert 0.04 < high < 0.07, "5 % beside the trace's own"


def test_a_part_of_the_cluster_has_the_load_of_the_whole() -> None:
    """Jobs, GPUs that they ask for over their time, and cores of CPU jobs: a quarter of each, as of the
    nodes."""
    whole, part = make(0, 1), workload(PART, 0)
    assert EACH == 4
    for asked in (
        lambda job: 1.0,
        lambda job: job.gpus * job.duration_s,
        lambda job: 0.0 if job.gpus else (job.cores or 0) * job.duration_s,
    ):
        assert sum(map(asked, part.jobs)) == pytest.approx(sum(map(asked, whole)) / 4, rel=0.15)
