"""Estimates against the truth: what `penstock estimator report` says about tiers, owners and the worst
jobs."""

import math

import pytest

from penstock_services.estimator.core.accuracy import STRETCHES, accuracy_of, remaining, share
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import (
    Allocation,
    Card,
    EstimateSummary,
    EtaAtHalf,
    FinishedRun,
    JobInfo,
)


def run(
    number: int,
    promised_mib: int,
    used_mib: float,
    *,
    tier: str = "model",
    owner: str = "ada",
    refused: str = "",
    asked: tuple[str, ...] = (),
) -> FinishedRun:
    return FinishedRun(
        number,
        f"job-{number}",
        JobInfo(b"k", owner, "resnet50", 64, 1, 0, asked),
        Allocation(1, 1_000, 2, Card("T4", 15_360)),
        EstimateSummary(tier, "m1", 0.8, None, 2, 0, promised_mib, 50.0),
        Run(ended_ms=number, seq=number, run_ms=1_000, gpu_memory_mib=used_mib, gpu_utilisation_percent=40),
        refused,
    )


def test_each_tier_is_judged_by_itself() -> None:
    """The model promises 10 % too much by the median and broke one promise of four; the default is far
    off."""
    runs = [run(n, 1_100, 1_000) for n in range(3)] + [
        run(3, 900, 1_000),
        run(4, 4_000, 1_000, tier="default"),
    ]
    found = accuracy_of(runs)
    memory = found.tiers["model"]["gpu_memory_mib"]
    assert (memory.runs, memory.median_ratio, memory.broken) == (4, 1.1, 0.25)
    assert memory.p95_off == pytest.approx(1 / 0.9)
    assert found.tiers["default"]["gpu_memory_mib"].median_ratio == 4
    assert math.isnan(found.tiers["model"]["gpu_utilisation_percent"].broken), "a mean is no promise"
    assert "cores" not in found.tiers["model"], "nobody measured them"


def test_the_worst_job_stands_first_and_users_are_not_blamed_for_it() -> None:
    """A request of the user's is his; the worst estimate of ours is the one to look at."""
    runs = [run(0, 1_100, 1_000), run(1, 300, 1_000), run(2, 16_000, 1_000, asked=("gpu_memory_mib",))]
    worst = accuracy_of(runs).worst[0]
    assert (worst.run.job_id, worst.estimate, worst.used) == ("job-1", 300, 1_000)


def test_one_command_that_ran_often_does_not_fill_the_list_of_the_worst() -> None:
    """A nightly job is off in the same way each night; the list has room for what is wrong elsewhere."""
    nightly = [run(number, 5_000, 1_000) for number in range(30)]
    once = run(30, 3_000, 1_000)._replace(info=nightly[0].info._replace(key=b"other"))
    worst = [one for one in accuracy_of([*nightly, once]).worst if one.field == "gpu_memory_mib"]
    assert [one.run.job_id for one in worst] == ["job-0", "job-30"]


def test_who_asks_for_more_than_he_uses_is_named() -> None:
    """Bob always asks for 16 GiB and uses 2; Eve asked twice, which says nothing yet; Ada asks for what she
    needs."""
    asked = ("gpu_memory_mib",)
    runs = [run(n, 16_000, 2_000, owner="bob", asked=asked) for n in range(3)]
    runs += [run(n, 16_000, 2_000, owner="eve", asked=asked) for n in range(2)]
    runs += [run(n, 1_100, 1_000, owner="ada", asked=asked) for n in range(5)]
    [found] = accuracy_of(runs).over_asking
    assert (found.owner, found.field, found.runs, found.asked_to_used) == ("bob", "gpu_memory_mib", 3, 8)


def test_drift_shows_over_the_stretches() -> None:
    """A library was updated after the 40th run, and memory doubled: the last half is off by that much."""
    found = accuracy_of([run(n, 1_000, 1_000 if n < 40 else 2_000) for n in range(80)])
    drift = found.drift["gpu_memory_mib"]
    assert len(drift) == STRETCHES
    assert drift[:4] == [0] * 4
    assert drift[4:] == [math.log(2)] * 4


def test_what_was_rejected_is_counted_by_reason_and_judges_nobody() -> None:
    runs = [run(0, 1_000, 17_000, refused="gpu_memory_mib: 17000 on a card of 15360"), run(1, 1_000, 1_000)]
    found = accuracy_of(runs)
    assert found.rejected == {"gpu_memory_mib": 1}
    assert found.tiers["model"]["gpu_memory_mib"].runs == 1
    assert accuracy_of([]).runs == 0


def test_intervals_of_remaining_time_are_counted_on_both_sides() -> None:
    """Ten runs were told 60 s with 50 to 80 around it: one ended after 40 s, two after 100 s."""
    predicted = [
        EtaAtHalf(60_000, 50_000, 80_000, actual) for actual in [60_000] * 7 + [40_000, 100_000, 100_000]
    ]
    found = remaining([*predicted, EtaAtHalf(9_000, 8_000, 10_000, 0)])
    assert found is not None
    assert (found.runs, found.held.value, found.early, found.late) == (10, 0.7, 0.1, 0.2)
    assert found.median_off == 1
    assert found.p95_off == pytest.approx(100 / 60)
    assert found.held.low == pytest.approx(0.397, abs=0.001), "ten runs say little"
    assert found.held.high == pytest.approx(0.892, abs=0.001)
    assert remaining([]) is None


def test_absurd_remaining_times_are_misses_and_nothing_worse() -> None:
    """Somebody handed in words of a thousand years, of nothing, and of less than nothing measurable."""
    predicted = [
        EtaAtHalf(1e308, 0, 1.7e308, 1_000),
        EtaAtHalf(0, 0, 0, 500),
        EtaAtHalf(1e-308, 0, 1e-300, 1_000),
    ]
    found = remaining(predicted)
    assert found is not None
    assert found.runs == 3
    assert found.held.value == pytest.approx(1 / 3)
    assert found.late == pytest.approx(2 / 3)
    assert found.p95_off < 1e12


def test_a_share_of_few_runs_is_not_taken_for_certain() -> None:
    """Six of six promises were kept: that does not say that all will be."""
    assert share(6, 6)[:2] == (6, 1.0)
    assert share(6, 6).low == pytest.approx(0.61, abs=0.01)
    assert share(0, 6).low == 0


def test_kills_for_memory_are_no_runs() -> None:
    """Three workers were killed: they are counted by themselves, and nothing of them is judged."""
    runs = [run(n, 1_100, 1_000) for n in range(2)]
    kills = [
        run(n, 1_100, math.nan, refused="out_of_memory: killed with 2048 MiB of host memory")
        for n in (2, 3, 4)
    ]
    found = accuracy_of(runs + kills)
    assert (found.runs, found.killed, found.rejected) == (2, 3, {})
    assert found.tiers == accuracy_of(runs).tiers
