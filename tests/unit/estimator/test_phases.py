"""How long a job launches and saves, by its own runs or by the nearest of its network."""

import pytest

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.history import Run, Runs
from penstock_services.estimator.core.resources.nearest import Nearest, phase_ms
from penstock_services.estimator.core.runs import job_info


def job(owner: str = "bob", model: str | None = "bert") -> JobSpec:
    return JobSpec(owner=owner, command=("python", f"{owner}.py"), model=model, batch_size=32)


def ran(seq: int, launch_ms: float, save_ms: float = float("nan")) -> Run:
    return Run(ended_ms=seq, seq=seq, launch_ms=launch_ms, save_ms=save_ms)


def test_the_same_jobs_runs_count_first() -> None:
    """Bob's nightly job launches in 20 s, once in 90 s from a cold disk; Ada's in 5 s: it is hers, with other data."""
    nearest, own = Nearest(), Runs()
    nearest.add(job_info(job("ada")), ran(1, 5_000, 1_000))
    for seq, launch_ms in enumerate((20_000, 90_000, 21_000)):
        own.add(ran(seq, launch_ms))
    assert phase_ms("launch_ms", job(), own, nearest) == 21_000
    assert phase_ms("save_ms", job(), own, nearest) == 1_000, "his own runs never told: the network's do"
    assert phase_ms("launch_ms", job_info(job()), None, nearest) == 5_000, (
        "a live job is known without its spec"
    )


@pytest.mark.parametrize("model", [None, "resnet50"])
def test_a_network_that_nobody_ran_is_computed_without(model: str | None) -> None:
    """Better no time around the training than somebody else's."""
    nearest = Nearest()
    nearest.add(job_info(job("ada")), ran(1, 5_000))
    assert phase_ms("launch_ms", job(model=model), None, nearest) == 0


@pytest.mark.parametrize("lie_ms", [0.0, 1e12])
def test_one_owner_does_not_move_it_beyond_two_others(lie_ms: float) -> None:
    """Mallory's script tells of a launch of thirty years, or of none at all, a hundred times."""
    nearest = Nearest()
    for owner, launch_ms in (("ada", 5_000), ("eve", 6_000)):
        for seq in range(2):
            nearest.add(job_info(job(owner)), ran(seq, launch_ms))
    for seq in range(100):
        nearest.add(job_info(job("mallory")), ran(seq, lie_ms))
    assert 5_000 <= phase_ms("launch_ms", job(), None, nearest) <= 6_000
