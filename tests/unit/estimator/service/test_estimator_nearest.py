"""Estimates for a command that nobody has run, from runs of the same network by other commands."""

import random
from fractions import Fraction

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.learning.limits import (
    NEAREST_NETWORKS,
    NEAREST_NETWORKS_OF_ONE,
    NEAREST_OWNERS,
    NEAREST_RUNS_OF_ONE,
)
from penstock_services.estimator.core.records.history import Run, key_of
from penstock_services.estimator.core.records.runs import JobInfo
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.core.resources.nearest import (
    FARTHEST,
    NEAREST,
    Nearest,
    NearestTier,
)


def job_info(owner: str = "ada", model: str | None = "resnet50", batch: int | None = 64) -> JobInfo:
    return JobInfo(b"k", owner, model, batch, 1, 0, ())


def ran(seq: int, memory_mib: float, gpu_memory_mib: float = 4_000, run_ms: float = 60_000) -> Run:
    return Run(
        ended_ms=seq,
        seq=seq,
        run_ms=run_ms,
        gpus=4,
        busy_cores=2,
        host_memory_mib=memory_mib,
        gpu_memory_mib=gpu_memory_mib,
        gpu_utilisation_percent=70,
    )


def spec(batch: int | None = 64, model: str | None = "resnet50") -> JobSpec:
    return JobSpec(owner="bob", command=("python", "new.py"), model=model, batch_size=batch)


def test_a_new_command_is_reported_what_others_of_its_network_used() -> None:
    """Bob copies Ada's script and renames it: its key is new, its network is not."""
    nearest = Nearest()
    for seq in range(3):
        nearest.add(job_info(), ran(seq, 1_000 + seq))
    found = estimate(spec(), (NearestTier(nearest),))
    assert (found.tier, found.worker.host_memory_mib, found.worker.gpu_memory_mib) == (
        "nearest",
        1_103,
        4_400,
    )
    assert (found.worker.gpus, found.run_ms) == (1, 60_000)
    assert 0.1 < found.confidence < 0.3
    assert found.source.startswith("median of the 2 nearest runs of resnet50 by other commands")


def test_the_nearest_batch_size_counts() -> None:
    """Memory grows with the batch: runs at 64 say more about 48 than those at 16; 8 times as much says
    nothing."""
    nearest = Nearest()
    for batch, memory_mib in ((16, 500), (64, 2_000)):
        for owner in "abcdefgh":
            nearest.add(job_info(owner, batch=batch), ran(batch, memory_mib))
    assert [run.host_memory_mib for _, run in nearest.to(spec(48))] == [2_000] * 8
    assert nearest.to(spec(1_024)) == []
    assert nearest.to(spec(None)) != [], "who tells no batch size is as far as may be, not beyond"
    assert nearest.to(spec(model=None)) == []
    assert nearest.to(spec(model="vgg16")) == []


def test_one_owner_does_not_move_what_others_are_predicted() -> None:
    """Mallory submits a thousand runs that claim a terabyte of memory: four others still decide the
    median."""
    nearest = Nearest()
    for owner in "abcd":
        for seq in range(2):
            nearest.add(job_info(owner), ran(seq, 1_000, run_ms=60_000))
    for seq in range(1_000):
        nearest.add(job_info("mallory"), ran(10_000 + seq, 1 << 20, run_ms=1))
    runs = nearest.to(spec())
    assert sum(run.run_ms == 1 for _, run in runs) == 2
    found = estimate(spec(), (NearestTier(nearest),))
    assert (found.run_ms, found.worker.host_memory_mib) == (60_000, 2_200)


def test_memory_is_bounded() -> None:
    """Everybody names his networks anew, and every student is an owner."""
    nearest = Nearest()
    for number in range(NEAREST_NETWORKS + 10):
        nearest.add(job_info(f"o{number % 8}", f"m{number}"), ran(number, 1))
    for number in range(NEAREST_OWNERS + 10):
        nearest.add(job_info(f"o{number}", "last"), ran(number, 1))
    assert len(nearest) == NEAREST_NETWORKS
    assert len(nearest._networks.of_key("last")) == NEAREST_OWNERS
    assert nearest.to(spec(model="m0")) == []
    nearest.add(job_info(model=None), ran(1, 1))
    assert key_of(spec()) != key_of(spec(63))


def test_a_sweep_pushes_out_only_its_own_networks() -> None:
    """Mallory names his network by the hour for a year; what Ada ran in spring is still known."""
    nearest = Nearest()
    nearest.add(job_info(), ran(0, 1_000))
    for number in range(3 * NEAREST_NETWORKS):
        nearest.add(job_info("mallory", f"m{number}"), ran(1 + number, 1))
    assert [run.host_memory_mib for _, run in nearest.to(spec())] == [1_000]
    assert len(nearest) == 1 + NEAREST_NETWORKS_OF_ONE
    assert nearest.to(spec(model="m0")) == []


def ratio(one: int | None, other: int | None) -> Fraction:
    """Of the larger batch size to the smaller."""
    if one is None or other is None:
        return Fraction(1) if one is other else Fraction(FARTHEST)
    return Fraction(max(one, other), min(one, other))


def test_near_runs_are_found_as_by_looking_at_all_of_them() -> None:
    """Many owners, batch sizes that repeat and that nobody told; runs come between the questions."""
    rng = random.Random(1)
    for _ in range(30):
        nearest, runs = Nearest(), []
        for seq in range(1, rng.randrange(2, 60)):
            batch = rng.choice([None, 8, 9]) if rng.random() < 0.1 else rng.choice([8, 16, 32, 64, 100])
            job = JobInfo(b"k", f"user-{seq % 20}", "bert", batch, rng.choice([1, 2]), 0, ())
            runs.append((job, Run(ended_ms=1.0, seq=float(seq), run_ms=5.0)))
            nearest.add(*runs[-1])
            asked = JobInfo(b"k", "me", "bert", rng.choice([None, 1, 7, 16, 32]), 1, 0, ())
            ranked = sorted(
                (far, abs(one.workers - 1), -run.seq, one.owner)
                for one, run in runs
                if (far := ratio(one.batch_size, asked.batch_size)) <= FARTHEST
            )
            best = [
                entry
                for at, entry in enumerate(ranked)
                if [e[3] for e in ranked[:at]].count(entry[3]) < NEAREST_RUNS_OF_ONE
            ]
            assert [(owner, -run.seq) for owner, run in nearest.to(asked)] == [
                (owner, seq) for _, _, seq, owner in best[:NEAREST]
            ]
